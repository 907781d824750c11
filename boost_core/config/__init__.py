"""The job spec: everything a user can specify about a job, checked before anything runs.

Nothing here imports torch, so the API can check jobs without it.
"""

from boost_core.config.data import DataConfig, SourceConfig, WeightedSource
from boost_core.config.job import CheckpointConfig, FaultToleranceConfig, JobSpec, ResourcesConfig, load_job
from boost_core.config.model import Activation, ModelConfig
from boost_core.config.parallelism import DataParallelRange, ElasticityConfig, Layout, ParallelismConfig, RecomputeMode
from boost_core.config.training import LoroConfig, MuonConfig, OptimizerConfig, TrainingConfig

__all__ = [
    "Activation",
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
