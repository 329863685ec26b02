"""The parts of bench/gateway.py: engines, load generator, routers, costs, report."""
