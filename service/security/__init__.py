"""What the service must keep safe: network exposure, storage, secrets."""
