"""Connections to a Redis server, Sentinel or Cluster."""
