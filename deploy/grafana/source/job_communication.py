"""Communication between a job's ranks: how long, how much, and which part training waits for."""

from deploy.grafana.source.frame import Row
from deploy.grafana.source.graphs import stacked, time_series
from deploy.grafana.source.panels import Query
from deploy.grafana.source.promql import JOB, a_step, rate, share

_BY = ("collective", "group")
_LEGEND = "{{collective}} {{group}}"

_STEP = rate("boost_rank_step_part_seconds_total", JOB)
_WHOLE = rate("boost_rank_communication_seconds_total", JOB)
_EXPOSED = rate("boost_rank_exposed_communication_seconds_total", JOB)


def row() -> Row:
    """Communication."""
    shares = time_series(
        "Share of the step",
        "Communication that training waits for, and the hidden part, as shares of the step's time.",
        "percentunit",
        Query(f"{_EXPOSED} / {_STEP}", "exposed"),
        Query(f"clamp_min({_WHOLE} - {_EXPOSED}, 0) / {_STEP}", "hidden"),
    )
    seconds = time_series(
        "Seconds by collective",
        "Duration of a step's collectives on a rank, from start to end, including hidden ones.",
        "s",
        Query(a_step("boost_rank_communication_seconds_total", JOB, *_BY), _LEGEND),
    )
    exposed = time_series(
        "Waited for by collective",
        "Time that a rank waits for the collectives of a step.",
        "s",
        Query(a_step("boost_rank_exposed_communication_seconds_total", JOB, *_BY), _LEGEND),
    )
    volume = time_series(
        "Bytes by collective",
        "Payload of a step's collectives on a rank.",
        "bytes",
        Query(a_step("boost_rank_communication_bytes_total", JOB, *_BY), _LEGEND),
    )
    speed = time_series(
        "Bandwidth by collective",
        "Payload divided by the duration of the collectives.",
        "binBps",
        Query(_bandwidth(), _LEGEND),
    )
    calls = time_series(
        "Calls by collective",
        "Collectives that a rank starts in a step.",
        "none",
        Query(a_step("boost_rank_communication_calls_total", JOB, *_BY), _LEGEND),
    )
    return Row("Communication", [stacked(shares), stacked(seconds), stacked(exposed), stacked(volume), speed, calls])


def _bandwidth() -> str:
    volume = rate("boost_rank_communication_bytes_total", JOB, *_BY)
    return share(volume, rate("boost_rank_communication_seconds_total", JOB, *_BY), *_BY)
