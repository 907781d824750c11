"""All jobs and the cluster at a glance: whether it is used, and used well, which jobs wait, and what is wrong."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source import annotations, fleet_head, fleet_use, links, queues, variables
from deploy.grafana.source.frame import Row, frame
from deploy.grafana.source.graphs import counted, quantiles, stacked, stepped, time_series
from deploy.grafana.source.numbers import bars
from deploy.grafana.source.panels import Query
from deploy.grafana.source.promql import NAMES, TENANTS, earlier, goodput, newest, rate, total
from deploy.grafana.source.tables import OF_JOBS, Column, table


def fleet() -> Dashboard:
    """The dashboard."""
    rows = [fleet_head.row(), _jobs(), _training(), _cluster(), fleet_use.row(), _requests()]
    board = frame("boost-fleet", "Boost / Fleet", "All jobs, queues and machines at a glance.", rows)
    board = board.with_variable(variables.tenants()).with_variable(variables.gpu_hour_price())
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
