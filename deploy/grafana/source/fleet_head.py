"""How everything stands now, in numbers, and what is wrong."""

from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.builders import table as tables

from deploy.grafana.source.frame import Row
from deploy.grafana.source.numbers import count, levels
from deploy.grafana.source.panels import Need, Query
from deploy.grafana.source.promql import TENANTS, goodput, newest, total
from deploy.grafana.source.queues import WAITING_JOBS
from deploy.grafana.source.tables import Column, table

_FIRING = 'ALERTS{alertname=~"Boost.*", alertstate="firing"}'


def row() -> Row:
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
