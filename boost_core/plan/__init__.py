"""Torch-free arithmetic about a job: parameters, FLOPs and communication, before anything runs."""
