"""``docs/metrics.md`` against what is exported."""

import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import Metric

from service.accounts.tenants_and_queues import QuotaStore
from service.api.app import create_app
from service.gang.worker.rank_metrics import StepCollector, TransportCollector, gauges
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.settings import Settings
from service.telemetry.exporter import ServiceCollector
from service.telemetry.jobs import LABELS
from service.telemetry.process import ProcessMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<type>\w+) \| (?P<labels>[^|]*)\|", re.MULTILINE)
SUFFIXES = {"counter": "_total", "info": "_info"}


def exported(families: Iterable[Metric]) -> dict[str, str]:
    """Types by name, as in the text format that has no infos."""
    return {
        family.name + SUFFIXES.get(family.type, ""): "gauge" if family.type == "info" else family.type
        for family in families
    }


OF_RANKS = ("boost_rank_", "boost_gang_")


def documented(begins: str | tuple[str, ...]) -> dict[str, str]:
    return {row["name"]: row["type"] for row in ROW.finditer(PAGE) if row["name"].startswith(begins)}


def test_the_page_names_all_that_the_api_exports(store: JobStore) -> None:
    collector = ServiceCollector(store, QuotaStore(store), ProcessMetrics())
    of_ranks = documented(OF_RANKS)
    page = {name: kind for name, kind in documented("").items() if name not in of_ranks}
    assert page == exported(collector.collect())


def test_the_page_names_all_that_ranks_export() -> None:
    registry = CollectorRegistry()
    registry.register(StepCollector())
    registry.register(TransportCollector())
    ProcessCollector(registry=registry)
    assert documented(OF_RANKS) | documented("process_") == exported([*registry.collect(), *gauges(None, ())])


def test_the_page_names_the_labels(store: JobStore) -> None:
    """Of metrics without values the families know their labels."""
    collector = ServiceCollector(store, QuotaStore(store), ProcessMetrics())
    labels = {
        family.name + SUFFIXES.get(family.type, ""): set(getattr(family, "labels", ()))
        for family in collector.collect()
    }
    for row in ROW.finditer(PAGE):
        of_all = set(LABELS) if row["name"].startswith("boost_job_") else set()
        if row["name"].startswith(("boost_job_", "boost_queue_", "boost_tenant_", "boost_cluster_")):
            heads = [label.partition(":")[0] for label in row["labels"].split(";")]
            assert of_all | set(re.findall(r"`(\w+)`", " ".join(heads))) == labels[row["name"]], row["name"]


def test_the_excerpt_scrapes_paths_that_there_are(store: JobStore, tmp_path: Path) -> None:
    (excerpt,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    api, ranks = yaml.safe_load(excerpt)["scrape_configs"]
    paths = create_app(store, Settings(home=tmp_path), Outlook).openapi()["paths"]
    assert api.get("metrics_path", "/metrics") in paths
    assert ranks["http_sd_configs"][0]["url"].endswith(":8900/v1/metrics/targets")
    assert "/v1/metrics/targets" in paths
