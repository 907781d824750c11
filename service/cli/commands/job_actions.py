"""``boost pause``, ``resume``, ``cancel``, ``retry``, ``patch`` and ``drill``: act on a job."""

from typing import Annotated

import typer

from boost_core.config import JobSpec
from boost_core.messages.commands import Drill
from service.cli.connection import open_client
from service.cli.failures import BadInput
from service.cli.options import JobId, Url
from service.cli.output.job_text import news
from service.cli.output.printing import say
from service.jobs.states import JobState


def pause(job_id: JobId, url: Url = None) -> None:
    """Pause a job: it saves its state and releases its resources."""
    with open_client(url) as client:
        job = client.pause(job_id)
    say(f"{job.id} is PAUSED" if job.state is JobState.PAUSED else f"{job.id} will be paused after its current step")


def resume(job_id: JobId, url: Url = None) -> None:
    """Resume a paused job."""
    with open_client(url) as client:
        job = client.resume(job_id)
    say(f"{job.id} is {job.state}: {news(job)}")


def cancel(job_id: JobId, url: Url = None) -> None:
    """Cancel a job."""
    with open_client(url) as client:
        job = client.cancel(job_id)
    say(f"{job.id} is {job.state}" if job.finished else f"{job.id} will be cancelled within seconds")


def retry(job_id: JobId, url: Url = None) -> None:
    """Requeue a failed or cancelled job; it continues from its newest checkpoint."""
    with open_client(url) as client:
        job = client.retry(job_id)
    say(f"{job.id} is {job.state} again and continues from step {job.checkpoint.step if job.checkpoint else 0}")


def patch(
    job_id: JobId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    priority: Annotated[int | None, typer.Option(help="New priority; higher-priority jobs start first.")] = None,
    min_replicas: Annotated[int | None, typer.Option(help="Minimum number of data parallel replicas.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="Maximum number of data parallel replicas.")] = None,
    min_gpus: Annotated[int | None, typer.Option(help="Minimum number of GPUs, with layouts: auto.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Maximum number of GPUs, with layouts: auto.")] = None,
    url: Url = None,
) -> None:
    """Change a job that has not ended."""
    replicas, gpus = _given(min=min_replicas, max=max_replicas), _given(min=min_gpus, max=max_gpus)
    changes = _given(name=name, priority=priority, data_parallel_size=replicas or None, gpus=gpus or None)
    if not changes:
        raise BadInput(
            "nothing to change; give --name, --priority, --min-replicas, --max-replicas, --min-gpus or --max-gpus"
        )
    with open_client(url) as client:
        job = client.patch(job_id, changes)
    say(f"{job.id} is {job.name}, priority {job.spec.priority}, with {_size(job.spec)}")


def _size(spec: JobSpec) -> str:
    """Return the allowed sizes of a job's gang."""
    elasticity = spec.elasticity
    if elasticity and elasticity.gpus:
        ranks = "GPU(s)" if spec.resources.gpus_per_worker else "worker(s)"
        return f"{elasticity.gpus.min} to {elasticity.gpus.max} {ranks}"
    replicas = elasticity.data_parallel_size if elasticity else None
    return f"{f'{replicas.min} to {replicas.max}' if replicas else spec.parallelism.data_parallel_size} replica(s)"


def drill(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=Drill.model_fields["kind"].description)],
    job_id: JobId,
    rank: Annotated[int | None, typer.Option(help="The rank to inject it into (default: 0).")] = None,
    at_step: Annotated[int | None, typer.Option(help="Inject after this step (default: immediately).")] = None,
    steps: Annotated[int | None, typer.Option(help="For delay_rank: number of steps (default: 10).")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="For delay_rank: delay per step; for drop_node and fill_store: duration (default: 10)."),
    ] = None,
    url: Url = None,
) -> None:
    """Inject one fault into a running job, to see it recover."""
    with open_client(url) as client:
        job = client.drill(job_id, _given(kind=kind, rank=rank, at_step=at_step, steps=steps, seconds=seconds))
    say(f"{kind} will be injected into {job.id}; see the result: boost events {job.id} -f")


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}
