"""One rank of a gang: what Ray Train runs in each worker. Imports torch; the API process never imports this."""

import logging
import os
import socket
from typing import Any, TypedDict

import ray.train
import torch

from boost_core.config import JobSpec
from boost_core.train import train
from service.gang.reporter import LogReports, SupervisorReporter

FLUSH_TIMEOUT_SECONDS = 30.0

logger = logging.getLogger("boost_core")


class WorkerConfig(TypedDict):
    """What a worker is told: the job, and the handle of the ``Supervisor`` actor to report to."""

    spec: JobSpec
    supervisor: Any


def work(config: WorkerConfig) -> None:
    """Train on this rank until the job's last step; Ray Train has initialised the process group.

    Raises:
        Exception: What the trainer raised. Its traceback has reached the supervisor by then.
    """
    context = ray.train.get_context()
    spec, rank = config["spec"], context.get_world_rank()
    torch.set_num_threads(max(1, int(spec.resources.cpus_per_worker)))
    reporter = SupervisorReporter(config["supervisor"])
    handler = LogReports(reporter, rank)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        logger.info(
            "worker %d of %d is up (host %s, pid %d)", rank, context.get_world_size(), socket.gethostname(), os.getpid()
        )
        train(spec, reporter)
    except Exception:
        logger.exception("worker %d stops", rank)
        raise
    finally:
        logger.removeHandler(handler)
        reporter.flush(FLUSH_TIMEOUT_SECONDS)
