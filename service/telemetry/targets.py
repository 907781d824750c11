"""Service discovery: where the ranks of jobs serve their metrics."""

from collections.abc import Iterable, Iterator

from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.models.targets import TargetGroup, TargetLabels


def targets(jobs: Iterable[JobRecord]) -> list[TargetGroup]:
    """Return the ranks of RUNNING jobs that serve metrics."""
    return [group for job in jobs if job.state is JobState.RUNNING for group in _ranks(job)]


def _ranks(job: JobRecord) -> Iterator[TargetGroup]:
    gang, layout = job.shape, job.present_layout
    if gang is None:
        return
    for rank, endpoint in enumerate(gang.metrics_endpoints):
        if endpoint is not None:
            at = layout.coordinates(rank)
            labels = TargetLabels(
                job_id=job.id, job_name=job.name, tenant=job.tenant, rank=str(rank), tensor_parallel_rank=str(at.tp),
                pipeline_parallel_rank=str(at.pp), data_parallel_rank=str(at.dp), context_parallel_rank=str(at.cp),
                node=gang.nodes[rank],
            )  # fmt: skip
            yield TargetGroup(targets=[endpoint], labels=labels)
