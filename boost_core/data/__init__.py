"""From text to batches of tokens, addressed by a global sample index."""
