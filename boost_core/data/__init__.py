"""Text in, batches of tokens out, addressed by one global sample index."""
