"""Several processes behind one port: fronts that serve clients, and the router process that counts and routes."""
