"""Who may ask, how much, and under which salt: API keys, tenants' limits, and the queue in front of full engines."""
