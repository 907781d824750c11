"""A rank of a gang without torch: it trains nothing, and ends as it is told to."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import ray
from ray.train.v2._internal.execution.worker_group import RayTrainWorker

from boost_core.messages import CheckpointReport
from service.gang.assignment import Assignment, End, RankEnd, Rendezvous, WorkerPlace
from service.gang.ray_train.rank_worker import SETTINGS, RankWorker, report_checkpoint
from tests.jobs import tiny_job


class Idle:
    """In the place of the trainer: a rank that does nothing until it is told how to end."""

    def __init__(self) -> None:
        self._told, self._end = threading.Event(), RankEnd(End.FINISHED)

    def join(self, assignment: Assignment, recovery: None) -> None:
        self._told.clear()

    def train(self, assignment: Assignment) -> RankEnd:
        self._told.wait()
        return self._end

    def stop(self, end: RankEnd) -> None:
        self._end = end
        self._told.set()

    def abort(self) -> None:
        """Nothing is waited for."""


class Rank(RankWorker):
    """A rank without torch."""

    def __init__(self) -> None:
        os.environ.update(SETTINGS)
        RayTrainWorker.__init__(self)
        self._title, self._generations, self._owners = "rank", {}, {}
        self._reporting, self._reported, self._worker = ThreadPoolExecutor(1), [], Idle()

    def where(self) -> WorkerPlace:
        runtime = ray.get_runtime_context()
        actor = str(runtime.get_actor_id())
        return WorkerPlace(runtime.get_node_id(), "127.0.0.1", ("0",), os.getpid(), "host", actor)

    def stop(self, end: RankEnd) -> None:
        self._worker.stop(end)

    def save(self, step: int, folder: str) -> None:
        url = f"{folder}/step-{step:08d}"
        report = CheckpointReport(step=step, url=url, bytes=1, seconds=0.0)
        self._reported.append(self._reporting.submit(report_checkpoint, report))


def assigned(generation: int, rank: int = 0) -> Assignment:
    return Assignment(generation, tiny_job("unused", "unused"), rank, Rendezvous("", 0, ""), ())
