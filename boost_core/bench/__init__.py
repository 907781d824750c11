"""Measurements of this machine for the planner: a profile of a device, a job's own steps, and links."""
