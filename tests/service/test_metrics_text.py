"""The text of metrics is what prometheus-client writes, byte for byte."""

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.accounts.tenants_and_queues import QuotaStore
from service.jobs.store import JobStore
from service.telemetry.exporter import MOST_JOBS, TenantCollector, exposition
from service.telemetry.jobs import Family
from tests.service.records import a_spec, start

FORMATS = (
    "",
    "text/plain;version=0.0.4",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/openmetrics-text;version=1.0.0;escaping=underscores",
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain",
    "text/plain;version=1.0.0;escaping=dots",
    "application/openmetrics-text;version=1.0.0;escaping=dots",
    "application/openmetrics-text;version=1.0.0;escaping=values",
)


OWN = CollectorRegistry()
Histogram("boost_wait_seconds", "A histogram.", ("route",), registry=OWN).labels("/v1").observe(0.1)
Counter("boost_requests", "With the time of its creation.", registry=OWN).inc(exemplar={"trace": "1"})


class Odd(Collector):
    """Every kind of metric, with values and labels that must be escaped."""

    def collect(self) -> Iterator[Metric]:
        values = (0.0, -1, 1e-9, 1e21, 123456789.0, float("nan"), float("inf"), float("-inf"), True, None)
        rows = [(('quo"te', "back\\slash\nline ü"), value) for value in values]
        yield Family("boost_gauge_seconds", "A gauge\nof \\two lines.", ("b", "a"), rows)
        yield Family("boost_empty", "Nothing.", ("a",))
        yield Family("boost_one_ratio", "Without labels.", rows=[((), 0.5)])
        yield Family("boost_counter_total", "A counter.", ("cause",), [(("x",), 3), (("y",), 4)])
        yield from OWN.collect()


@pytest.mark.parametrize("accept", FORMATS)
def test_the_text_is_that_of_prometheus_client(accept: str) -> None:
    registry = CollectorRegistry()
    registry.register(Odd())
    encode, media_type = choose_encoder(accept)
    assert exposition(Odd(), accept) == (encode(registry), media_type)


def test_jobs_beyond_the_limit_are_counted_but_have_no_series(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.telemetry.exporter.MOST_JOBS", 2)
    assert MOST_JOBS > 2
    ids = [store.create(a_spec(), "file:///c").id for _ in range(4)]
    start(store, ids[3])
    text = exposition(TenantCollector(store, QuotaStore(store)), "")[0].decode()
    shown = [job_id for job_id in ids if f'job_id="{job_id}"' in text]
    assert shown == [ids[0], ids[3]]  # the one with a gang, and the one that came first
    assert "\nboost_jobs_left_out 2.0\n" in text
    assert '\nboost_queue_jobs{queue="default",state="QUEUED"} 3.0\n' in text
