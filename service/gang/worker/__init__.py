"""What a worker does in its own process, free of Ray."""
