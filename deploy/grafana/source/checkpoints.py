"""Checkpoints of all jobs: their age, size and duration, and whether the store accepts them."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    JOBS,
    NAMES,
    OF_JOBS,
    Column,
    Query,
    Row,
    frame,
    newest,
    share,
    stepped,
    table,
    time_series,
    total,
)

_LEGEND = "{{job_name}} {{job_id}}"


def checkpoints() -> Dashboard:
    """The dashboard."""
    says = "How much of each job is saved, what saving costs, and whether the store accepts it."
    board = frame(
        "boost-checkpoints", "Boost / Checkpoints", says, [_safe(), _cost(), _store()], ["tenant", "job_name"]
    )
    return board.annotation(panels.restarts(JOBS)).link(panels.to_service())


def _of_jobs(metric: str) -> str:
    return newest(f"boost_job_{metric}", JOBS, *NAMES)


def _each(title: str, says: str, unit: str, expr: str) -> timeseries.Panel:
    return time_series(title, says, unit, Query(expr, _LEGEND)).span(12)


def _safe() -> Row:
    age = f"time() - {_of_jobs('checkpoint_timestamp_seconds')}"
    at_risk = f"{_of_jobs('step')} - {_of_jobs('checkpoint_step')}"
    newest_ones = table(
        "Newest checkpoints",
        "Each job's newest checkpoint.",
        OF_JOBS,
        [
            Column("Step", "locale", _of_jobs("checkpoint_step")),
            Column("Age", "s", age),
            Column("Steps since", "locale", at_risk),
            Column("Size", "bytes", _of_jobs("checkpoint_bytes")),
            Column("Held training", "s", _of_jobs("checkpoint_seconds")),
            Column("Took to commit", "s", _of_jobs("checkpoint_commit_seconds")),
        ],
    )
    return Row(
        "What is safe",
        [
            newest_ones,
            _each("Age", "Time since each job's newest checkpoint was committed.", "s", age),
            stepped(_each("Steps since", "Steps that are not in a checkpoint yet.", "locale", at_risk)),
        ],
    )


def _cost() -> Row:
    whole = total(newest("boost_job_goodput_seconds", JOBS, *NAMES, "kind"), *NAMES)
    spent = newest("boost_job_goodput_seconds", f'{JOBS}, kind="checkpoint"', *NAMES)
    return Row(
        "What saving costs",
        [
            _each(
                "Held training",
                "How long the newest checkpoint blocked the step loop.",
                "s",
                _of_jobs("checkpoint_seconds"),
            ),
            _each(
                "Share of the job's time",
                "Share of each job's time for which checkpoints and copies blocked it.",
                "percentunit",
                share(spent, whole, *NAMES),
            ),
        ],
    )


def _store() -> Row:
    speed = share(_of_jobs("checkpoint_bytes"), f"({_of_jobs('checkpoint_commit_seconds')} > 0)", *NAMES)
    faults = newest("boost_job_faults_total", f'{JOBS}, what="store"', *NAMES)
    return Row(
        "The store",
        [
            _each(
                "Time to commit",
                "From the time training continued until the newest checkpoint was committed.",
                "s",
                _of_jobs("checkpoint_commit_seconds"),
            ),
            _each("Speed", "Size of the newest checkpoint divided by the time to commit it.", "binBps", speed),
            stepped(_each("Size", "Size of the newest checkpoint.", "bytes", _of_jobs("checkpoint_bytes"))),
            stepped(
                _each("Store faults", "How often saving was abandoned or had to wait for the store.", "none", faults)
            ),
        ],
    )
