"""PromQL that all dashboards share.

Several replicas of the API may be scraped, and each shows the same series of a job, so what comes from the API's record
is read with ``max by``. A rank's series come from its one process and are summed.
"""

JOB = 'job_id="$job_id"'
JOBS = 'tenant=~"$tenant", job_name=~"$job_name"'
TENANTS = 'tenant=~"$tenant"'
NAMES = ("job_id", "job_name", "tenant")

_NEW_STEPS = 'kind="productive"'
_NOT_WAITING = 'kind!="waiting"'


def newest(metric: str, where: str = "", *by: str) -> str:
    """A gauge of the record, once for each value of ``by`` however many replicas show it."""
    return f"max{_by(by)}({_series(metric, where)})"


def earlier(metric: str, where: str = "", *by: str) -> str:
    """``newest`` as of one point of the graph before."""
    return f"max{_by(by)}({_series(metric, where)} offset $__interval)"


def rate(metric: str, where: str = "", *by: str) -> str:
    """A counter's increase a second, summed over all processes but for ``by``."""
    return f"sum{_by(by)}(rate({_series(metric, where)}[$__rate_interval]))"


def total(expr: str, *by: str) -> str:
    """The sum of an expression's series but for ``by``."""
    return f"sum{_by(by)}({expr})"


def goodput(where: str, *by: str) -> str:
    """The share of jobs' time that went into new steps; the time in which they waited is left out."""

    def seconds(kinds: str) -> str:
        return total(newest("boost_job_goodput_seconds", f"{where}, {kinds}", *NAMES, "kind"), *by)

    return f"{seconds(_NEW_STEPS)} / {seconds(_NOT_WAITING)}"


def share(part: str, whole: str, *by: str) -> str:
    """``part`` over the ``whole`` that has the same labels ``by``; over the only one without."""
    return f"{part} / on ({', '.join(by)}) group_left () {whole}"


def a_step(metric: str, where: str = JOB, *by: str) -> str:
    """What a counter of ranks grows by in an optimizer step, the mean of the ranks."""
    return share(rate(metric, where, *by), rate("boost_rank_steps_total", JOB))


def quantile(below: float, histogram: str, *by: str) -> str:
    """The value that the share ``below`` of a histogram's observations do not exceed."""
    return f"histogram_quantile({below}, {rate(f'{histogram}_bucket', '', 'le', *by)})"


def _series(metric: str, where: str) -> str:
    return f"{metric}{{{where}}}" if where else metric


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else " "
