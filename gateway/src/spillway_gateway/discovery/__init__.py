"""Finds a model's engines where nobody lists them: Kubernetes EndpointSlices and DNS."""
