"""``boost profile``: trace some steps of a job with torch's profiler."""

from collections.abc import Iterator
from typing import Annotated

import typer

from boost_core.messages import Profile
from service.cli.connection import open_client
from service.cli.failures import Failed
from service.cli.options import JobId, Url
from service.cli.output.event_text import line_of
from service.cli.output.printing import say
from service.client import Client
from service.jobs.model import EventKind, JobEvent

_TELLING: tuple[EventKind, ...] = ("profile", "fault", "interruption")  # possible outcomes of a profile
_READERS = "a trace opens at https://ui.perfetto.dev, or in TensorBoard"


def profile(
    job_id: JobId,
    steps: Annotated[int, typer.Option(help="Number of steps, 1 to 20.")] = Profile().steps,
    rank: Annotated[list[int] | None, typer.Option(help="Rank to trace (default: 0); repeatable.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the traces and print their locations.")] = False,
    url: Url = None,
) -> None:
    """Trace some steps of a running job with torch's profiler. The traces are stored next to its checkpoints."""
    ranks = rank or [0]
    with open_client(url) as client:
        seen = max((event.id for event in client.events(job_id, follow=False, kinds=_TELLING)), default=0)
        job = client.profile(job_id, {"steps": steps, "ranks": ranks})
        if wait:
            for trace in _traces(client, job_id, seen, set(ranks)):
                say(trace)
        else:
            say(f"{steps} step(s) of {job.id} will be traced; for the traces' locations: boost events {job.id} -f")
            say(_READERS)


def _traces(client: Client, job_id: str, seen: int, ranks: set[int]) -> Iterator[str]:
    """Yield the URL of each rank's trace as it arrives.

    Raises:
        Failed: A trace will not be written.
    """
    for event in client.events(job_id, after=seen, kinds=_TELLING):
        if event.kind == "interruption" or _is_failure(event, ranks):
            raise Failed(f"{line_of(event)}; incomplete profiles are lost; run the command again")
        if event.kind == "profile" and event.data["rank"] in ranks:
            ranks.remove(event.data["rank"])
            yield event.data["url"]
        if not ranks:
            return
    raise Failed(f"the job ended before the steps of rank {min(ranks)} were traced")


def _is_failure(event: JobEvent, ranks: set[int]) -> bool:
    return event.kind == "fault" and event.data["what"] == "profile" and event.data["rank"] in ranks
