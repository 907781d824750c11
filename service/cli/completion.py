"""Shell completion of job IDs: the newest jobs. It must be quick and never print an error."""

import typer

from service.cli.connection import open_client

_SECONDS = 1.0


def complete_job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the job IDs that start with what was typed, with descriptions; none if the service is slow to answer."""
    try:
        with open_client(context.params.get("url"), timeout=_SECONDS, retry_seconds=0) as client:
            jobs = client.list().jobs
    except Exception:  # whatever it is, it cannot be reported during completion
        return []
    return [(job.id, f"{job.name}, {job.state}") for job in jobs if job.id.startswith(incomplete)]
