"""Finds a model's engines if the configuration does not list them: Kubernetes EndpointSlices and DNS."""
