"""The names of all series that Prometheus can have of us, asked of the code that exports them."""

from collections.abc import Iterable
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from service.accounts.tenants_and_queues import QuotaStore
from service.gang.worker.rank_metrics import StepCollector, TransportCollector, gauges
from service.jobs.database import migrate
from service.jobs.store import JobStore
from service.telemetry.exporter import ServiceCollector
from service.telemetry.process import ProcessMetrics

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"

_PUBLISHED = Path(__file__).parent / "published.yml"
_OWN = {"up", "ALERTS"}  # Prometheus makes these of its targets and rules
_ENDINGS = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_count", "_sum"),
    "info": ("_info",),
}


def names(folder: Path) -> set[str]:
    """What the API, the ranks and the recording rules give names to; in ``folder`` a record without jobs is made."""
    url = f"sqlite:///{folder / 'boost.db'}"
    migrate(url)
    store = JobStore(url)
    service = ServiceCollector(store, QuotaStore(store), ProcessMetrics())
    process = ProcessCollector(registry=CollectorRegistry())
    of_ranks = [*StepCollector().collect(), *TransportCollector().collect(), *gauges(None, [])]
    ours = [*service.collect(), *of_ranks, *process.collect()]
    return _OWN | _series(ours) | _recorded() | published()


def published() -> set[str]:
    """What other exporters give names to."""
    return {name for exporter in yaml.safe_load(_PUBLISHED.read_text()).values() for name in exporter["names"]}


def _series(families: Iterable[Metric]) -> set[str]:
    return {f"{family.name}{ending}" for family in families for ending in _ENDINGS.get(family.type, ("",))}


def _recorded() -> set[str]:
    groups = [group for path in RULES.glob("*.yml") for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
