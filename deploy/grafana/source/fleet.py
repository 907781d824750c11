"""All jobs and the cluster at a glance: whether it is used, and used well, which jobs wait, and what is wrong."""

from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.builders.dashboard import Dashboard, TextBoxVariable

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    GPU_HOUR_PRICE,
    NAMES,
    OF_JOBS,
    TENANTS,
    WAITING_JOBS,
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

_FIRING = 'ALERTS{alertname=~"Boost.*", alertstate="firing"}'


def fleet() -> Dashboard:
    """The dashboard."""
    rows = [_now(), _jobs(), _training(), _cluster(), _use(), _requests()]
    board = frame("boost-fleet", "Boost / Fleet", "All jobs, queues and machines at a glance.", rows, ["tenant"])
    # What a GPU costs in an hour, in whichever currency; the chart sets it.
    price = TextBoxVariable(GPU_HOUR_PRICE).label("Price of a GPU-hour").default_value("0")
    board = board.with_variable(price)
    return board.annotation(panels.restarts(TENANTS)).link(panels.to_service())


def _value(title: str, says: str, unit: str, expr: str) -> stat.Panel:
    return count(title, says, unit, Query(expr))


def _now() -> Row:
    """Two lines of numbers on how everything stands, and the alerts."""
    firing = _value("Alerts", "Alerts that fire.", "none", f"count({_FIRING}) or vector(0)")
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
    labels = {"alertname": "Alert", "severity": "Severity", "job_name": "Job", "tenant": "Tenant", "job_id": "Id"}
    alerts = table(
        "Firing",
        "Firing alerts and what they are about; the runbook has a page for each.",
        {**labels, "queue": "Queue", "rank": "Rank"},
        [Column("", "none", f"max by ({', '.join(labels)}, queue, rank) ({_FIRING})")],
    )
    shown = [
        _value(
            "GPUs",
            "GPUs that the nodes have.",
            "none",
            newest("boost_cluster_resources", 'resource="GPU", condition="total"'),
        ),
        _value(
            "Free GPUs",
            "GPUs that no gang holds.",
            "none",
            newest("boost_cluster_resources", 'resource="GPU", condition="free"'),
        ),
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
        firing.thresholds(levels("green", (1, "red"))),
        failed.decimals(0).thresholds(levels("text", (1, "yellow"))),
        restarts.decimals(0).thresholds(levels("text", (1, "yellow"))),
        wait.thresholds(levels("text", (3600, "yellow"), (86400, "red"))),
        leaving.thresholds(levels("text", (1, "yellow"))),
        replicas.thresholds(levels("red", (1, "text"))),
        alerts.height(5).no_value(Need.ALERT),
    ]
    return Row("Now", shown)


def _of_jobs(metric: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", TENANTS, *NAMES, *by)


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
    return Row("Jobs", [jobs, stepped(states), panels.waiting_jobs(), panels.longest_wait()])


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
    before = earlier("boost_job_restarts_total", TENANTS, *NAMES, "cause")
    restarts = time_series(
        "Restarts by cause",
        "How often jobs resumed after each kind of interruption.",
        "none",
        Query(total(f"{_of_jobs('restarts_total', 'cause')} - {before}", "cause"), "{{cause}}"),
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


def _use() -> Row:
    """What the time that is looked at has cost, by tenant and by queue: GPU-hours, and their price."""
    shown = []
    for of in ("tenant", "queue"):
        held = newest(f"boost_{of}_gpus_held", TENANTS if of == "tenant" else "", of)
        hours = f"sum_over_time({held}[$__range:1m]) / 60"  # a value a minute, and none where nobody looked
        says = f"GPU-hours that the gangs of each {of} have held within the selected time range."
        shown.append(bars(f"GPU-hours by {of}", says, "suffix: h", Query(f"sort_desc({hours})", f"{{{{{of}}}}}")))
        says = f"Their cost at the price of a GPU-hour set at the top, in its currency, for each {of}."
        cost = Query(f"sort_desc({hours} * $gpu_hour_price)", f"{{{{{of}}}}}")
        shown.append(bars(f"Cost by {of}", says, "none", cost).decimals(2))
    return Row("Use", [panel.span(6) for panel in shown])


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
