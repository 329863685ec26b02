"""Access: API keys and tenants, cache salts, limits, the queue in front of full engines, the audit log."""
