"""The optimizer: AdamW on fp32 master weights, LORO and Muon on low-rank factors, schedules, and clipping by norm."""
