"""The optimizer: AdamW on fp32 master weights, the learning rate's schedule, and clipping by the global norm."""
