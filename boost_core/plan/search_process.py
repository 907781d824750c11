"""Runs a search in a separate process, which blocks nothing else and can be killed.

``python -m boost_core.plan.search_process`` reads a ``SearchTask`` as JSON and writes the result.
"""

import os
import subprocess
import sys
from typing import TypeVar

from pydantic import Field, ValidationError

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.plan.machine import NOMINAL, Basis, Fitted
from boost_core.plan.resolve import ChosenLayouts, choose_layouts
from boost_core.plan.run_cost import CONDITIONS, RunConditions
from boost_core.plan.search import PlanSearch, SearchReport, search_report

_NICENESS = 10
_LONGEST_REASON = 200  # characters

Result = TypeVar("Result", bound=Config)


class TooLong(RuntimeError):
    """A search did not finish in time."""


class SearchFailed(RuntimeError):
    """A search ended without a result; the message says why."""


class SearchTask(Config):
    """A job and what to search for; without ``request``, the layouts of a job with ``layouts: auto`` are chosen."""

    job: JobSpec
    request: PlanSearch | None = None
    basis: Basis = Field(NOMINAL, description="What predictions are based on; a search has its own profile.")
    conditions: RunConditions = Field(CONDITIONS, description="What a search plans checkpoints and failures with.")


class LayoutsResult(Config):
    """Result of choosing layouts."""

    chosen: ChosenLayouts | None = None
    problem: str | None = Field(None, description="Why none could be chosen.")


def search_apart(
    job: JobSpec, request: PlanSearch, timeout_seconds: float, fitted: Fitted | None = None,
    conditions: RunConditions = CONDITIONS,
) -> SearchReport:  # fmt: skip
    """Search in another process.

    Args:
        job: The job.
        request: What to search for.
        timeout_seconds: Seconds after which the search is killed.
        fitted: Corrections from jobs, for the profile in ``request``.
        conditions: Prices, failures and the checkpoints' store.

    Raises:
        TooLong: It took longer.
        SearchFailed: It ended without a report, or with numbers that are not finite.
    """
    remedy = "search for fewer GPUs or without explain, or run `boost plan --gpus` yourself"
    task = SearchTask(job=job, request=request, basis=Basis(fitted=fitted), conditions=conditions)
    return _apart(task, timeout_seconds, SearchReport, remedy)


def layouts_apart(job: JobSpec, timeout_seconds: float, basis: Basis = NOMINAL) -> ChosenLayouts:
    """Choose the layouts of a job with ``layouts: auto`` in another process.

    Args:
        job: The job.
        timeout_seconds: Seconds after which the search is killed.
        basis: What predictions are based on.

    Raises:
        TooLong: It took longer.
        SearchFailed: None could be chosen; says why, and what to change.
    """
    remedy = "narrow elasticity.gpus, or list elasticity.layouts"
    answer = _apart(SearchTask(job=job, basis=basis), timeout_seconds, LayoutsResult, remedy)
    if answer.chosen is None:
        raise SearchFailed(answer.problem)
    return answer.chosen


def _apart(task: SearchTask, timeout_seconds: float, kind: type[Result], remedy: str) -> Result:
    command, sent = [sys.executable, "-m", "boost_core.plan.search_process"], task.model_dump_json().encode()
    try:
        done = subprocess.run(command, input=sent, capture_output=True, timeout=timeout_seconds, check=True)
    except subprocess.TimeoutExpired as error:
        raise TooLong(f"this search took longer than {timeout_seconds:g} s; {remedy}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [f"it ended with {error.returncode}"]
        raise SearchFailed(f"the search for ways to train this job failed: {lines[-1][:_LONGEST_REASON]}") from error
    try:
        return kind.model_validate_json(done.stdout)
    except ValidationError as error:
        raise SearchFailed("the predicted times of this job on these GPUs overflow; check its sizes") from error


def main() -> None:
    """Run the search given on standard input."""
    os.nice(_NICENESS)
    task = SearchTask.model_validate_json(sys.stdin.buffer.read())
    result: LayoutsResult | SearchReport
    if task.request is not None:
        result = search_report(task.job, task.request, task.basis.fitted, task.conditions)
    else:
        try:
            result = LayoutsResult(chosen=choose_layouts(task.job, task.basis))
        except ValueError as error:
            result = LayoutsResult(problem=str(error))
    sys.stdout.write(result.model_dump_json())


if __name__ == "__main__":
    main()
