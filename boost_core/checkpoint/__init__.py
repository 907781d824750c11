"""Checkpoints on object storage: sharded, independent of the layout that wrote them, and committed atomically."""
