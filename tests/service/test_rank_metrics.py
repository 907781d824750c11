"""Each rank's endpoint, of a real gang on a real Ray: what it counts is what the job's events say."""

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from boost_core.train import StepParts, StepTimes, Totals
from service.gang.ray.gangs import RayGangs
from service.gang.status import GangPhase
from service.gang.worker.rank_metrics import StepCollector, serve_metrics
from tests.jobs import tiny_job, write_corpus
from tests.service.conftest import free_port
from tests.service.test_gang import ENDLESS, Gang, ended, trained

PARTS = {"data", "forward", "backward", "optimizer", "exposed_communication", "other"}
Sample = tuple[str, frozenset[tuple[str, str]]]


def scrape(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[Sample, float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: dict[Sample, float], name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for (each, labels), value in found.items() if each == name}


def part(found: dict[Sample, float], name: str) -> float:
    return found["boost_rank_step_part_seconds_total", frozenset({("part", name)})]


# A process


A_STEP = StepTimes(
    step=1, seconds=1.25, busy_seconds=1.0,
    parts=StepParts(
        data=0.0625, forward=0.25, backward=0.375, optimizer=0.0625, exposed_communication=0.125, other=0.125
    ),
    communication={
        ("all_reduce", "tp"): Totals(calls=3, elements=300, bytes=1200, seconds=0.25, exposed_seconds=0.125),
        ("all_gather", "dp"): Totals(calls=1, elements=10, bytes=40, seconds=0.5),
    },
)  # fmt: skip


def test_counters_are_sums_over_steps() -> None:
    steps = StepCollector()
    endpoint = serve_metrics([steps], (), "127.0.0.1", range(free_port(), 65_536))
    for _ in range(2):
        steps.add(A_STEP)
    found = samples(scrape(endpoint))
    assert found["boost_rank_steps_total", frozenset()] == 2
    assert {name: part(found, name) for name in PARTS} == {
        "data": 0.125, "forward": 0.5, "backward": 0.75, "optimizer": 0.125, "exposed_communication": 0.25,
        "other": 0.25,
    }  # fmt: skip
    tensor = frozenset({("collective", "all_reduce"), ("group", "tp")})
    data = frozenset({("collective", "all_gather"), ("group", "dp")})
    assert of(found, "boost_rank_communication_seconds_total") == {tensor: 0.5, data: 1.0}
    assert of(found, "boost_rank_exposed_communication_seconds_total") == {tensor: 0.25, data: 0.0}
    assert of(found, "boost_rank_communication_bytes_total") == {tensor: 2400, data: 80}
    assert of(found, "boost_rank_communication_calls_total") == {tensor: 6, data: 2}


def test_processes_take_one_port_after_the_other_until_there_is_none() -> None:
    first = free_port()
    ports = range(first, first + 3)
    endpoints = [serve_metrics([StepCollector()], (), "127.0.0.1", ports) for _ in range(4)]
    assert endpoints == [f"127.0.0.1:{port}" for port in ports] + [None]
    assert serve_metrics([StepCollector()], (), "127.0.0.1", range(0)) is None


# A gang


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGangs]:
    first = free_port()
    gangs = RayGangs(None, 2, tmp_path_factory.mktemp("secrets"), metrics_ports=range(first, first + 50))
    gangs.connect()
    yield gangs
    gangs.close()


@pytest.fixture
def start(gangs: RayGangs, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gang]]:
    name = f"job-{request.node.name.strip('_')}"
    corpus = write_corpus(tmp_path / "corpus")
    yield lambda **changes: Gang(gangs, name, tiny_job(corpus, tmp_path / "checkpoints", **changes))
    gangs.end(name, 1)


@pytest.mark.nightly
def test_a_gangs_endpoints_count_what_its_events_say_and_go_with_it(start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS)
    gang.until(trained(20))
    (shape,) = gang.of("shape")
    first, second = shape.metrics_endpoints
    assert first != second
    texts = [scrape(endpoint) for endpoint in (first, second)]
    for text in texts:
        check = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        assert (check.returncode, check.stdout + check.stderr) == (0, "")

    found = samples(texts[0])
    steps = int(found["boost_rank_steps_total", frozenset()])
    assert steps >= 20
    gang.until(trained(steps))
    events = gang.of("progress")[:steps]
    for name in ("data", "forward", "backward", "optimizer"):
        assert part(found, name) == pytest.approx(sum(getattr(event, f"{name}_seconds") for event in events))
    exposed = sum(event.exposed_communication_seconds for event in events)
    assert part(found, "exposed_communication") == pytest.approx(exposed)
    assert sum(of(found, "boost_rank_exposed_communication_seconds_total").values()) == pytest.approx(exposed)
    assert sum(part(found, name) for name in PARTS) == pytest.approx(sum(event.step_seconds for event in events))
    sent = sum(event.communication_bytes for event in events)
    assert sum(of(found, "boost_rank_communication_bytes_total").values()) == sent
    took = sum(event.communication_seconds for event in events)
    assert sum(of(found, "boost_rank_communication_seconds_total").values()) == pytest.approx(took)
    groups = {dict(labels)["group"] for labels in of(found, "boost_rank_communication_calls_total")}
    assert groups == {"tp", "all"}
    for text in texts:
        assert samples(text)["process_resident_memory_bytes", frozenset()] > 2**20
        assert not [name for name, _ in samples(text) if name.startswith("boost_rank_gpu_")]

    gang.gangs.end(gang.job_id, 1)
    for endpoint in (first, second):
        await_end(endpoint, 10)


@pytest.mark.nightly
def test_without_a_free_port_a_rank_says_so_and_trains(
    gangs: RayGangs, start: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((node_address(), 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(gangs, "_metrics_ports", range(port, port + 1))
        gang = start(training={"steps": 5})
        gang.until(ended)
    assert gang.status.phase is GangPhase.SUCCEEDED
    assert [report.metrics_endpoints for report in gang.of("shape")] == [[None, None]]
    said = f"serves no metrics: no port from {port} to {port} is free; widen BOOST_RANK_METRICS_PORTS"
    assert {line.rank for line in gang.of("log") if said in line.message and line.level == "WARNING"} == {0, 1}


def node_address() -> str:
    return ray.util.get_node_ip_address()


def await_end(endpoint: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            scrape(endpoint)
        except (urllib.error.URLError, ConnectionError):
            return
        time.sleep(0.1)
    raise AssertionError(f"{endpoint} still answers")
