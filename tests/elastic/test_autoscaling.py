"""A waiting job makes a node come, and the node goes when nobody needs it: the service with Ray's own autoscaler."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from service.client import Client
from service.gang.ray.gangs import RayGangs
from service.gang.status import Bundle
from service.jobs.states import JobState
from tests.elastic.autoscaled import autoscaled_cluster
from tests.elastic.test_ray_contract import within
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server

pytestmark = pytest.mark.nightly

CPUS = 2  # of a node


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with autoscaled_cluster(CPUS, most=1) as address:
        yield address


def test_ray_refuses_what_no_node_could_hold_and_all_else_with_it(cluster: str, tmp_path: Path) -> None:
    gangs = RayGangs(cluster, None, tmp_path)
    gangs.connect()
    try:
        gangs.request_nodes([Bundle({"CPU": 1}), Bundle({"CPU": 1}, {"zone": "nowhere"})])
        assert within(20, gangs.refused)
        assert not ray.cluster_resources().get("CPU")
        gangs.request_nodes([])
        assert not gangs.refused()
    finally:
        gangs.close()


def test_a_node_comes_for_a_job_and_goes_after_it(cluster: str, tmp_path: Path) -> None:
    server = Server(tmp_path / "home", BOOST_AUTH="false", BOOST_RAY_ADDRESS=cluster, BOOST_AUTOSCALING="true")
    try:
        server.until(lambda: (ready := server.answers("/readyz")) and ready.is_success)
        with Client(server.url) as client:

            def cpus() -> float:
                return sum(node.total.get("CPU", 0) for node in client.nodes().nodes)

            assert cpus() == 0
            job = client.submit(tiny_job(write_corpus(tmp_path / "corpus"), tmp_path / "checkpoints"))
            server.until(lambda: client.get(job.id).state is JobState.SUCCEEDED)
            assert cpus() == CPUS
            server.until(lambda: cpus() == 0)
    finally:
        server.end(signal.SIGTERM)
