"""Context parallelism: where the tokens of a window are placed, what ranks send each other, and attention.

The common form of published systems (FCP, arXiv 2605.08524; DistCA, 2510.18121; MTraining, 2510.18830; MagiAttention)
consists of chunks of tokens, a map of chunks to ranks, tasks (a chunk's queries and the chunks of keys that they see)
with the rank that computes each, the transfers that follow from these, and their order. ``placement``, ``plan`` and
``selection`` do not import torch; the others carry the plan out.
"""
