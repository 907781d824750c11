"""The scheduler: whether it runs, how long its passes take, which jobs wait, and the use of limits."""

from grafana_foundation_sdk.builders import statetimeline
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models.dashboard import ValueMap, ValueMappingResult

from deploy.grafana.source.panels import (
    NAMES,
    OF_JOBS,
    PROMETHEUS,
    Column,
    Query,
    Row,
    count,
    frame,
    levels,
    longest_wait,
    newest,
    over_time,
    quantiles,
    rate,
    stepped,
    table,
    time_series,
    to_service,
    tooltip,
    waiting_jobs,
)


def scheduler() -> Dashboard:
    """The dashboard."""
    says = "Which replica schedules and how fast, which jobs wait, and how much of their limits queues and tenants use."
    board = frame("boost-scheduler", "Boost / Scheduler", says, [_passes(), _waiting(), _limits()])
    return board.link(to_service())


def _passes() -> Row:
    leaders = count(
        "Schedulers",
        "Number of replicas that hold the lease: one, or none for some seconds when it changes hands.",
        "none",
        Query("sum(boost_scheduler_leading)"),
    )
    failing = count(
        "Failed passes",
        "Passes that failed within the selected time range.",
        "none",
        Query('sum(increase(boost_scheduler_passes_total{outcome="failed"}[$__range]))'),
    )
    seen = count(
        "Cluster seen",
        "Time since the scheduler last saw the cluster.",
        "s",
        Query(f"time() - {newest('boost_cluster_seen_timestamp_seconds')}"),
    )
    # A band for each replica, whose colour says whether it schedules.
    words = {
        "0": ValueMappingResult("stands by", "semi-dark-blue"),
        "1": ValueMappingResult("schedules", "semi-dark-green"),
    }
    leading = statetimeline.Panel().title("Who schedules").description("Which replica holds the lease.")
    leading = leading.datasource(PROMETHEUS).unit("none").mappings([ValueMap(words)]).tooltip(tooltip())
    leading = leading.targets(over_time([Query("max by (instance) (boost_scheduler_leading)", "{{instance}}")]))
    duration = quantiles("Duration", "Duration of a pass over all jobs.", "boost_scheduler_pass_duration_seconds")
    outcomes = time_series(
        "Passes",
        "Passes per second, by outcome.",
        "suffix: passes/s",
        Query(rate("boost_scheduler_passes_total", "", "outcome"), "{{outcome}}"),
    )
    return Row(
        "Passes",
        [
            leaders.thresholds(levels("red", (1, "green"), (2, "red"))),
            failing.decimals(0).thresholds(levels("text", (1, "yellow"), (10, "red"))),
            seen.thresholds(levels("text", (30, "yellow"), (120, "red"))),
            leading.height(4).span(12),
            duration.span(12),
            outcomes.span(12),
        ],
    )


def _waiting() -> Row:
    running = time_series(
        "Jobs that run",
        "Jobs of each queue that have a gang.",
        "none",
        Query(newest("boost_queue_jobs", 'state="RUNNING"', "queue"), "{{queue}}"),
    )
    jobs = table(
        "Waiting jobs",
        "Jobs that are queued or waiting for resources, and their waiting times.",
        OF_JOBS,
        [Column("Waits", "s", newest("boost_job_waiting_seconds", "", *NAMES))],
    )
    return Row("Waiting", [waiting_jobs(), longest_wait(), stepped(running), jobs])


def _limits() -> Row:
    shown = []
    for of in ("queue", "tenant"):
        held, limit = newest(f"boost_{of}_gpus_held", "", of), newest(f"boost_{of}_gpus_limit", "", of)
        panel = time_series(
            f"By {of}",
            f"GPUs that the gangs of each {of} hold, and its limit, if any.",
            "suffix: GPUs",
            Query(held, f"{{{{{of}}}}}"),
            Query(limit, f"{{{{{of}}}}} limit"),
        )
        shown.append(stepped(panel).span(12))
    return Row("GPUs held", shown)
