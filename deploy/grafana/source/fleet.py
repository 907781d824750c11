"""All jobs and the cluster at a glance: whether it is used, and used well, which jobs wait, and what is wrong."""

from grafana_foundation_sdk.builders import bargauge, stat
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source import annotations, links, panels, queues
from deploy.grafana.source.panels import (
    NAMES,
    OF_JOBS,
    TENANTS,
    Column,
    Need,
    Query,
    Row,
    bars,
    count,
    counted,
    earlier,
    frame,
    goodput,
    levels,
    newest,
    quantiles,
    rate,
    stacked,
    stepped,
    table,
    time_series,
    total,
)
from deploy.grafana.source.queues import WAITING_JOBS

# How everything stands now, in numbers, and what is wrong.

_FIRING = 'ALERTS{alertname=~"Boost.*", alertstate="firing"}'


def fleet_head_row() -> Row:
    """Two lines of numbers, and the alerts."""
    return Row("Now", [*_use(), *_trouble(), _alerts()])


def _value(title: str, says: str, unit: str, expr: str) -> stat.Panel:
    return count(title, says, unit, Query(expr))


def _use() -> list[stat.Panel]:
    return [
        _value("GPUs", "GPUs that the nodes have.", "none", _gpus("total")),
        _value("Free GPUs", "GPUs that no gang holds.", "none", _gpus("free")),
        _value("Running jobs", "Jobs that have a gang.", "none", newest("boost_jobs", 'state="RUNNING"')),
        _value("Waiting jobs", "Jobs that are queued or waiting for resources.", "none", WAITING_JOBS),
        _value(
            "Tokens",
            "Tokens trained on per second, over all jobs.",
            "si:tokens/s",
            total(newest("boost_job_tokens_per_second", TENANTS, "job_id")),
        ),
        _value(
            "Goodput",
            "Share of the jobs' time, without waiting, that went into new steps.",
            "percentunit",
            goodput(TENANTS),
        )
        .no_value("–")
        .thresholds(levels("red", (0.5, "yellow"), (0.7, "green"))),
    ]


def _trouble() -> list[stat.Panel]:
    alerts = _value("Alerts", "Alerts that fire.", "none", f"count({_FIRING}) or vector(0)")
    failed = _value(
        "Failed jobs",
        "Jobs that have failed within the selected time range.",
        "none",
        'max(delta(boost_jobs{state="FAILED"}[$__range]))',
    )
    restarts = _value(
        "Restarts",
        "How often jobs resumed after interruptions within the selected time range.",
        "none",
        total(f"max by (job_id, cause) (increase(boost_job_restarts_total{{{TENANTS}}}[$__range]))"),
    )
    wait = _value(
        "Longest wait now",
        "Waiting time of the job that has waited longest.",
        "s",
        newest("boost_queue_oldest_wait_seconds"),
    )
    leaving = _value(
        "Draining nodes", "Nodes about to leave.", "none", newest("boost_cluster_nodes", 'condition="draining"')
    )
    replicas = _value("Replicas", "Processes of the API that Prometheus can reach.", "none", 'sum(up{job="boost-api"})')
    return [
        alerts.thresholds(levels("green", (1, "red"))),
        failed.decimals(0).thresholds(levels("text", (1, "yellow"))),
        restarts.decimals(0).thresholds(levels("text", (1, "yellow"))),
        wait.thresholds(levels("text", (3600, "yellow"), (86400, "red"))),
        leaving.thresholds(levels("text", (1, "yellow"))),
        replicas.thresholds(levels("red", (1, "text"))),
    ]


def _alerts() -> tables.Panel:
    says = "Firing alerts and what they are about; the runbook has a page for each."
    labels = {"alertname": "Alert", "severity": "Severity", "job_name": "Job", "tenant": "Tenant", "job_id": "Id"}
    firing = f"max by ({', '.join(labels)}, queue, rank) ({_FIRING})"
    panel = table("Firing", says, {**labels, "queue": "Queue", "rank": "Rank"}, [Column("", "none", firing)])
    return panel.height(5).no_value(Need.ALERT)


def _gpus(condition: str) -> str:
    return newest("boost_cluster_resources", f'resource="GPU", condition="{condition}"')


# What the time that is looked at has cost: GPU-hours, and their price.


def fleet_use_row() -> Row:
    """By tenant and by queue."""
    return Row("Use", [panel.span(6) for of in ("tenant", "queue") for panel in (_hours(of), _cost(of))])


def _gpu_hours(of: str) -> str:
    held = newest(f"boost_{of}_gpus_held", TENANTS if of == "tenant" else "", of)
    return f"sum_over_time({held}[$__range:1m]) / 60"  # a value a minute, and none where nobody looked


def _hours(of: str) -> bargauge.Panel:
    says = f"GPU-hours that the gangs of each {of} have held within the selected time range."
    return bars(f"GPU-hours by {of}", says, "suffix: h", Query(f"sort_desc({_gpu_hours(of)})", f"{{{{{of}}}}}"))


def _cost(of: str) -> bargauge.Panel:
    says = f"Their cost at the price of a GPU-hour set at the top, in its currency, for each {of}."
    cost = f"sort_desc({_gpu_hours(of)} * $gpu_hour_price)"
    return bars(f"Cost by {of}", says, "none", Query(cost, f"{{{{{of}}}}}")).decimals(2)


def fleet() -> Dashboard:
    """The dashboard."""
    rows = [fleet_head_row(), _jobs(), _training(), _cluster(), fleet_use_row(), _requests()]
    board = frame("boost-fleet", "Boost / Fleet", "All jobs, queues and machines at a glance.", rows)
    board = board.with_variable(panels.tenants()).with_variable(panels.gpu_hour_price())
    return board.annotation(annotations.restarts(TENANTS)).link(links.to_service())


def _of_jobs(metric: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", TENANTS, *NAMES, *by)


def _before(metric: str, *by: str) -> str:
    return earlier(f"boost_job_{metric}", TENANTS, *NAMES, *by)


def _jobs() -> Row:
    jobs = table(
        "Jobs",
        "Each job that has not ended.",
        {**OF_JOBS, "state": "State", "queue": "Queue", "family": "Family"},
        [
            Column("", "none", _of_jobs("info", "state", "queue", "family")),
            Column("Workers", "none", _of_jobs("workers")),
            Column("Done", "percentunit", f"{_of_jobs('step')} / {_of_jobs('target_steps')}"),
            Column("Loss", "suffix: nats", _of_jobs("loss_nats")),
            Column("Speed", "si:tokens/s", _of_jobs("tokens_per_second")),
            Column("Goodput", "percentunit", goodput(TENANTS, *NAMES)),
            Column("Restarts", "none", total(_of_jobs("restarts_total", "cause"), *NAMES)),
            Column("Last step", "s", f"time() - {_of_jobs('progress_timestamp_seconds')}"),
        ],
    )
    states = time_series(
        "Jobs by state",
        "Number of jobs in each state, except those that have ended.",
        "none",
        Query(newest("boost_jobs", 'state!~"SUCCEEDED|FAILED|CANCELLED"', "state"), "{{state}}"),
    )
    return Row("Jobs", [jobs, stepped(states), queues.waiting_jobs(), queues.longest_wait()])


def _training() -> Row:
    tokens = time_series(
        "Tokens by job",
        "Tokens trained on per second, over all jobs.",
        "si:tokens/s",
        Query(_of_jobs("tokens_per_second"), "{{job_name}}"),
    )
    spent = bars(
        "Where the time went",
        "How the time of all jobs that have not ended was spent.",
        "s",
        Query(f"sort_desc({total(_of_jobs('goodput_seconds', 'kind'), 'kind')})", "{{kind}}"),
    )
    restarts = time_series(
        "Restarts by cause",
        "How often jobs resumed after each kind of interruption.",
        "none",
        Query(
            total(f"{_of_jobs('restarts_total', 'cause')} - {_before('restarts_total', 'cause')}", "cause"), "{{cause}}"
        ),
    )
    return Row("Training", [stacked(tokens), spent, counted(restarts)])


def _cluster() -> Row:
    gpus = time_series(
        "GPUs by tenant",
        "GPUs that each tenant's gangs hold, and free GPUs.",
        "suffix: GPUs",
        Query(newest("boost_tenant_gpus_held", TENANTS, "tenant"), "{{tenant}}"),
        Query(newest("boost_cluster_resources", 'resource="GPU", condition="free"'), "free"),
    )
    cpus = time_series(
        "CPUs",
        "CPUs of all nodes, and free CPUs.",
        "suffix: CPUs",
        Query(newest("boost_cluster_resources", 'resource="CPU"', "condition"), "{{condition}}"),
    )
    nodes = time_series(
        "Nodes",
        "Nodes that stay, and nodes about to leave.",
        "none",
        Query(newest("boost_cluster_nodes", "", "condition"), "{{condition}}"),
    )
    return Row("Cluster", [stacked(gpus), stepped(cpus), stepped(nodes)])


def _requests() -> Row:
    requests = time_series(
        "Requests",
        "Requests answered per second, by route.",
        "reqps",
        Query(rate("boost_http_requests_total", "", "method", "route"), "{{method}} {{route}}"),
    )
    refused = time_series(
        "Refused and failed",
        "Requests answered with an error per second.",
        "reqps",
        Query(rate("boost_http_requests_total", 'status=~"[45].."', "status"), "{{status}}"),
    )
    duration = quantiles("Duration", "Duration of requests, without streams.", "boost_http_request_duration_seconds")
    streams = time_series(
        "Streams",
        "Open event streams of each replica.",
        "none",
        Query("max by (instance) (boost_http_streams)", "{{instance}}"),
    )
    return Row("API", [panel.span(6) for panel in (requests, refused, duration, stepped(streams))])
