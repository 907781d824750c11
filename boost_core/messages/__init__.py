"""The messages between a gang and its workers, besides the job spec: reports and commands. Does not import torch."""
