"""Users of the service: tenants and queues with their quotas, API keys, and the audit log."""
