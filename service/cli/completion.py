"""What the shell offers for a job's id: the newest jobs. It must be quick, and an error would only be in the way."""

import typer

from service.cli.connection import open_client

_SECONDS = 1.0


def complete_job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids that begin as what has been typed, each with what the job is; none if the service does not say at once."""
    try:
        with open_client(context.params.get("url"), timeout=_SECONDS, retry_seconds=0) as client:
            jobs = client.list().jobs
    except Exception:  # whatever it is, there is nobody to tell
        return []
    return [(job.id, f"{job.name}, {job.state}") for job in jobs if job.id.startswith(incomplete)]
