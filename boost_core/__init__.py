"""The BOOST trainer: low-rank-bottleneck language models under bottleneck-aware tensor parallelism.

It knows nothing of Ray, HTTP or Kubernetes and runs under ``torchrun`` alone.
"""

__version__ = "0.2.0"
