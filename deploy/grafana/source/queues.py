"""What several dashboards show of queues."""

from grafana_foundation_sdk.builders import timeseries

from deploy.grafana.source.panels import Query, newest, stepped, time_series, total

_WAITING = newest("boost_queue_jobs", 'state!="RUNNING"', "queue", "state")
WAITING_JOBS = total(_WAITING)


def waiting_jobs() -> timeseries.Panel:
    """How many wait."""
    says = "Jobs of each queue that are queued or waiting for resources."
    return stepped(time_series("Jobs that wait", says, "none", Query(total(_WAITING, "queue"), "{{queue}}")))


def longest_wait() -> timeseries.Panel:
    """For how long."""
    says = "Waiting time of the job that has waited longest in each queue."
    wait = newest("boost_queue_oldest_wait_seconds", "", "queue")
    return time_series("Longest wait", says, "s", Query(wait, "{{queue}}"))
