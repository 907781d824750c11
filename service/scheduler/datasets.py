"""Builds datasets, one after the other, and stores their status in the record. Jobs come first."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from boost_core.config.base import counted
from service.gang.builds import Builds, BuildTask
from service.gang.status import NodeCapacity
from service.jobs.datasets import DatasetBuild, DatasetBuilds
from service.jobs.model import JobRecord
from service.jobs.outlook import cpus_without_rank
from service.models.datasets import DatasetState
from service.scheduler.cluster_snapshot import Launch
from service.scheduler.decisions import decide
from service.scheduler.quotas import Limits

MOST_LAUNCHES = 3
LAUNCH_PAUSE = timedelta(seconds=30)  # minimum between the first launch and the second; twice that before the third
ASIDE_SECONDS = timedelta(seconds=10)  # for which no build is launched after one has made room for a job

logger = logging.getLogger(__name__)


@dataclass
class DatasetReconciler:
    """Makes passes over all datasets that are to be built.

    A restarted service finds the build that its predecessor has started, or starts it again, which keeps the files that
    are done. So does one that was ended to make room for a job.

    Attributes:
        record: The datasets, written under the scheduler's lease.
        builds: A connected cluster.
        cpus: CPUs for building datasets.
        limits: Returns the tenants' quotas.
        in_need: Given the CPUs that a build may hold, returns a job that waits for them; see ``job_in_need``.
        now: Returns the current time.
        aside_until: When a build may be launched again after one has made room for a job.
    """

    record: DatasetBuilds
    builds: Builds
    cpus: float
    limits: Callable[[], Limits]
    in_need: Callable[[float], JobRecord | None]
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    aside_until: datetime = field(default=datetime.min.replace(tzinfo=UTC), init=False)

    def tick(self) -> None:
        """Do one pass.

        Raises:
            LeaseLost: Another process schedules now.
            Exception: The record or the cluster cannot be reached.
        """
        alive = self.builds.alive()
        self.record.forget_deleted(alive)
        waiting = self.record.waiting()
        # Those that were cancelled, deleted or requested again.
        unwanted = self.record.known(alive - {build.build_id for build in waiting})
        for build_id in unwanted:
            self.builds.end(build_id)
        current = [build for build in waiting if build.build_id in alive]
        for build in current:
            status = self.builds.poll(build.build_id)
            if status is None:
                continue  # gone; the next pass handles it
            progress = status.progress or build.progress
            values = {"progress": progress.model_dump() if progress else None}
            if status.problem is not None:
                self._finish(build, DatasetState.FAILED, status.problem, **values)
            elif (lineage := status.lineage) is not None:
                validation = sum(each["tokens"] for each in lineage["shards"] if each["part"] == "validation")
                more = {"validation_tokens": validation, "vocabulary": lineage["tokenizer"]["vocabulary"]}
                counts = lineage["counts"] | more
                values |= {"lineage": lineage, "counts": counts, "fingerprint": lineage["fingerprint"]}
                message = f"holds {counted(lineage['counts']['kept'], 'document')}"
                self._finish(build, DatasetState.READY, message, **values)
            elif (job := self.in_need(self._cpus_of(build))) is not None:
                # It is resumed later, which does not count as a death.
                logger.info("%s: makes room for %s", build.build_id, job.id)
                without = build.progress.model_copy(update={"cpus": 0.0}).model_dump() if build.progress else None
                whom = job.id if job.tenant == build.tenant else "a job of another tenant"
                message = f"has made room for {whom}, and continues when no job waits for its CPUs"
                self.record.update(build, launches=max(0, build.launches - 1), message=message, progress=without)
                self.builds.end(build.build_id)
                self.aside_until = self.now() + ASIDE_SECONDS
            elif progress != build.progress:
                self.record.update(build, message="is being built", **values)
        # Two builds must never write to the same folder at once.
        if current or unwanted or self.now() < self.aside_until:
            return
        for build in waiting:
            if build.launches >= MOST_LAUNCHES:
                died = f"its process has died {build.launches} times, perhaps out of memory or with its node"
                remedy = "see Ray's logs, and create it again to continue with the remaining files"
                self._finish(build, DatasetState.FAILED, f"{died}; {remedy}")
                continue
            pause = LAUNCH_PAUSE * 2 ** (build.launches - 1)
            if build.launched_at and build.launches and self.now() < build.launched_at + pause:
                continue
            cpus = self._cpus_of(build)
            started = {"launches": build.launches + 1, "launched_at": self.now(), "message": "is being built"}
            if cpus < 1:
                problem = f"the tenant's quota is {cpus:g} CPUs, but building a dataset takes at least one"
                self._finish(build, DatasetState.FAILED, problem)
            elif self.record.update(build, **started):  # else cancelled in the meantime
                build_id, spec = build.build_id, build.spec
                who = build_id, build.name, build.tenant
                logger.info("%s: dataset %r of %s is being built with %g CPUs", *who, cpus)
                self.builds.launch(BuildTask(build_id, build.tenant, spec.corpus, build.url, spec.credentials, cpus))
            return

    def _cpus_of(self, build: DatasetBuild) -> float:
        return min(self.cpus, self.limits().tenants.get(build.tenant, {}).get("CPU", self.cpus))

    def _finish(self, build: DatasetBuild, state: DatasetState, message: str, **values: Any) -> None:
        logger.info("%s: dataset %r of %s is %s: %s", build.build_id, build.name, build.tenant, state, message)
        self.record.update(build, state=state, message=message, finished_at=self.now(), **values)
        self.builds.end(build.build_id)


def job_in_need(
    cpus: float, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], limits: Limits
) -> JobRecord | None:
    """Return a job that could start now if the build held no CPUs; ``None`` if no job waits for them.

    Args:
        cpus: CPUs that the build may hold.
        jobs: All active jobs.
        nodes: Total and free resources of the alive nodes, which do not say what a build holds.
        limits: Quotas of tenants and queues.
    """
    stay = [job for job in jobs if not (job.cancel_requested or job.pause_requested)]
    without = []
    for node in nodes:
        of_build = min(cpus, cpus_without_rank(node.node_id, node.total, node.free, jobs))
        without.append(replace(node, free=node.free | {"CPU": node.free.get("CPU", 0.0) + of_build}))
    # Not one that does not need them, and has come since the scheduler's last pass.
    present, more = (
        {action.job.id: action.job for action in decide(stay, on, limits=limits) if isinstance(action, Launch)}
        for on in (nodes, without)
    )
    return next((job for job_id, job in more.items() if job_id not in present), None)
