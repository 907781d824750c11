"""Sparse attention: each query attends to a part of the keys before it, chosen anew in every step.

``index`` chooses, by vertical lines (keys that all see) and slashes (distances at which all see), as MTraining does
(arXiv 2510.18830); ``product`` computes exactly dense attention under that mask, and ``recall`` says what the mask
loses; ``attention`` is what a model's layers call.
"""
