"""What the service must not let through: addresses, storage, secrets."""
