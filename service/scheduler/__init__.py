"""The scheduler: pure decisions, and one loop that acts on them."""
