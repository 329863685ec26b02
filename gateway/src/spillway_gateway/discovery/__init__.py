"""Finds a model's engines where the configuration does not list them: Kubernetes EndpointSlices and DNS."""
