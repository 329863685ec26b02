"""The models and engines in service, and the tasks that follow them."""
