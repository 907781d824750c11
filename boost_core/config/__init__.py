"""The job spec: everything a user can specify about a job, checked before anything runs.

Nothing here imports torch, so the API can check jobs without it.
"""

from boost_core.config.checkpoint import CheckpointConfig
from boost_core.config.data import DataConfig, SourceConfig, WeightedSource
from boost_core.config.elasticity import DataParallelRange, ElasticityConfig
from boost_core.config.faults import FaultToleranceConfig
from boost_core.config.job import JobSpec, ResourcesConfig, load_job
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig, RecomputeMode
from boost_core.config.training import LoroConfig, MuonConfig, OptimizerConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DataParallelRange",
    "ElasticityConfig",
    "FaultToleranceConfig",
    "JobSpec",
    "Layout",
    "LoroConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "RecomputeMode",
    "ResourcesConfig",
    "SourceConfig",
    "TrainingConfig",
    "WeightedSource",
    "load_job",
]
