"""The record: what a job is, the states it goes through, and the store that keeps it."""
