"""The environment variables that Ray Train reads, in supervisors and in workers."""

import os

SETTINGS = {  # read by Ray Train from the environment
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # lines go into the gang's log, without secrets
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the gang's controller watches the nodes
}


def set_environment() -> None:
    """Set the environment before Ray Train reads it."""
    os.environ.update(SETTINGS)
