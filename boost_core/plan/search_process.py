"""A search in a process of its own, which holds nobody else up and can be ended.

``python -m boost_core.plan.search_process`` reads a ``SearchTask`` as JSON and writes the report.
"""

import os
import subprocess
import sys

from pydantic import ValidationError

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.plan.search_report import PlanSearch, SearchReport, search_report

_NICENESS = 10
_LONGEST_REASON = 200  # characters


class TooLong(RuntimeError):
    """A search has not ended in time."""


class SearchFailed(RuntimeError):
    """A search has ended without a report."""


class SearchTask(Config):
    """What to search for which job."""

    job: JobSpec
    asked: PlanSearch


def search_apart(job: JobSpec, asked: PlanSearch, timeout_seconds: float) -> SearchReport:
    """Search in another process.

    Args:
        job: The job.
        asked: What for.
        timeout_seconds: After which it is ended.

    Raises:
        TooLong: It took longer.
        SearchFailed: It has ended without a report, or with numbers that are none.
    """
    command = [sys.executable, "-m", "boost_core.plan.search_process"]
    task = SearchTask(job=job, asked=asked).model_dump_json()
    try:
        done = subprocess.run(command, input=task.encode(), capture_output=True, timeout=timeout_seconds, check=True)
    except subprocess.TimeoutExpired as error:
        raise TooLong(
            f"this search takes longer than {timeout_seconds:g} s; search for fewer GPUs or without explain, or run "
            "`boost plan --gpus` yourself"
        ) from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {error.returncode}"]
        raise SearchFailed(f"no way to train this job could be searched: {lines[-1][:_LONGEST_REASON]}") from error
    try:
        return SearchReport.model_validate_json(done.stdout)
    except ValidationError as error:
        raise SearchFailed("the times of this job on these GPUs are beyond all numbers; check its sizes") from error


def main() -> None:
    """Search what is asked for on standard input."""
    os.nice(_NICENESS)
    task = SearchTask.model_validate_json(sys.stdin.buffer.read())
    sys.stdout.write(search_report(task.job, task.asked).model_dump_json())


if __name__ == "__main__":
    main()
