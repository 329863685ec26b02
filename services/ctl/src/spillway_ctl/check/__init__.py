"""`spillway check`: values of the chart against its schema and the rules that hold between settings."""
