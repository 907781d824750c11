"""What crosses the trainer's door as data: the job spec that goes in and the reports that come out.

Nothing here imports torch, so that the API can check a job without it.
"""

from boost_core.config.checkpoint import CheckpointConfig
from boost_core.config.command import WorkerCommand
from boost_core.config.data import DataConfig, SourceConfig, WeightedSource
from boost_core.config.drill import Drill
from boost_core.config.elasticity import DataParallelRange, ElasticityConfig
from boost_core.config.faults import FaultToleranceConfig
from boost_core.config.job import JobSpec, ResourcesConfig, load_job
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.profile import Profile
from boost_core.config.training import LoroConfig, OptimizerConfig, TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DataParallelRange",
    "Drill",
    "ElasticityConfig",
    "FaultToleranceConfig",
    "JobSpec",
    "Layout",
    "LoroConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelismConfig",
    "Profile",
    "ResourcesConfig",
    "SourceConfig",
    "TrainingConfig",
    "WeightedSource",
    "WorkerCommand",
    "load_job",
]
