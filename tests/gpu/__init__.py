"""The kit for a GPU that is at hand for minutes, on a machine without a network.

``make gpu-kit`` (``kit``) prepares a folder; its ``run.sh`` runs the stages (``__main__``, ``stages``) on the GPU
machine; ``page`` writes what came back into docs/figures/gpu.md.
"""
