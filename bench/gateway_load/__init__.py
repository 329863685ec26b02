"""What bench/gateway.py is made of: engines, asking, routers, costs, report."""
