"""The job spec: everything a user can specify about a job, checked before anything runs.

``job`` is the whole, with checkpoints, resources, trackers and which combinations are legal; ``model``, ``parallelism``
and ``training`` (with data and optimizer) are its sections; ``base`` is what they share. Nothing here imports torch, so
the API can check jobs without it.
"""

import boost_core.config.storage  # noqa: F401  # fsspec opens disks and stores by it, whichever module opens them
from boost_core.config.job import FaultToleranceConfig, JobSpec, load_job
from boost_core.config.model import Activation, ModelConfig
from boost_core.config.parallelism import DataParallelRange, ElasticityConfig, Layout, ParallelismConfig, RecomputeMode
from boost_core.config.training import DataConfig, SourceConfig

__all__ = [
    "Activation",
    "DataConfig",
    "DataParallelRange",
    "ElasticityConfig",
    "FaultToleranceConfig",
    "JobSpec",
    "Layout",
    "ModelConfig",
    "ParallelismConfig",
    "RecomputeMode",
    "SourceConfig",
    "load_job",
]
