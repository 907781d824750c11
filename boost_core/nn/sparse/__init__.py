"""Sparse attention: each query attends to some of the keys before it, chosen again in every step.

``index`` chooses them, by vertical lines (keys that all see) and slashes (distances at which all see), as in MTraining
(arXiv 2510.18830); ``product`` computes dense attention under that mask exactly, and ``recall`` measures what the mask
loses; ``attention`` is what a model's layers call.
"""
