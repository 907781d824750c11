"""All jobs and the cluster at a glance: is it used, is it used well, who waits, and is anything wrong."""

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
        "How many jobs are in each state that is not an end.",
        "none",
        Query(newest("boost_jobs", 'state!~"SUCCEEDED|FAILED|CANCELLED"', "state"), "{{state}}"),
    )
    return Row("Jobs", [jobs, stepped(states), queues.waiting_jobs(), queues.longest_wait()])


def _training() -> Row:
    tokens = time_series(
        "Tokens by job",
        "Tokens trained on a second, over all jobs.",
        "si:tokens/s",
        Query(_of_jobs("tokens_per_second"), "{{job_name}}"),
    )
    spent = bars(
        "Where the time went",
        "What all the time of the jobs that have not ended went into.",
        "s",
        Query(f"sort_desc({total(_of_jobs('goodput_seconds', 'kind'), 'kind')})", "{{kind}}"),
    )
    restarts = time_series(
        "Restarts by cause",
        "How often jobs went on after each kind of interruption, at the time when they did.",
        "none",
        Query(
            total(f"{_of_jobs('restarts_total', 'cause')} - {_before('restarts_total', 'cause')}", "cause"), "{{cause}}"
        ),
    )
    return Row("Training", [stacked(tokens), spent, counted(restarts)])


def _cluster() -> Row:
    gpus = time_series(
        "GPUs by tenant",
        "GPUs that each tenant's gangs hold, and those that nobody holds.",
        "suffix: GPUs",
        Query(newest("boost_tenant_gpus_held", TENANTS, "tenant"), "{{tenant}}"),
        Query(newest("boost_cluster_resources", 'resource="GPU", condition="free"'), "free"),
    )
    cpus = time_series(
        "CPUs",
        "CPUs that the nodes have, and those that nobody holds.",
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
        "Requests a second that each route answered.",
        "reqps",
        Query(rate("boost_http_requests_total", "", "method", "route"), "{{method}} {{route}}"),
    )
    refused = time_series(
        "Refused and failed",
        "Requests a second that were answered with an error.",
        "reqps",
        Query(rate("boost_http_requests_total", 'status=~"[45].."', "status"), "{{status}}"),
    )
    duration = quantiles("Duration", "How long requests take, streams left out.", "boost_http_request_duration_seconds")
    streams = time_series(
        "Streams",
        "Event streams that each replica has open.",
        "none",
        Query("max by (instance) (boost_http_streams)", "{{instance}}"),
    )
    return Row("API", [panel.span(6) for panel in (requests, refused, duration, stepped(streams))])
