"""A service on a host that is no node of the Ray cluster: it joins it, and offers nothing."""

import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.hosts import Host, hosts
from tests.jobs import tiny_job, write_corpus
from tests.joined_cluster import BOOST, OutsideService, cluster, first_key

pytestmark = pytest.mark.nightly

LONG: dict[str, Any] = {"training": {"steps": 300}, "checkpoint": {"url": None, "every_steps": 150}}


def listening(host: Host) -> list[list[str]]:
    """The addresses that each rank on a host listens on."""
    sockets = subprocess.run(host.command("ss", "-ltnpH"), capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for line in sockets.splitlines():
        if "RankWorker" in line:
            _, _, _, local, *_, process = line.split()
            found.setdefault(process.partition("pid=")[2].partition(",")[0], []).append(local.rpartition(":")[0])
    return sorted(map(sorted, found.values()), key=len)


def test_a_service_outside_the_cluster_trains_on_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    token = home / "ray-token"
    token.write_text("ab" * 32)
    corpus = write_corpus(tmp_path / "corpus")
    with hosts(3) as (head, worker, outside), cluster(head, worker, token) as address:
        settings = {"BOOST_RAY_ADDRESS": address, "BOOST_ALLOWED_PREFIXES": str(corpus)}
        service = OutsideService(outside, home, first_key(home), [BOOST, "serve"], os.environ | settings)
        try:
            service.until(lambda: service.readiness()[0] == 200)
            service.until(lambda: service.client.nodes().nodes)
            assert [node.total["CPU"] for node in service.client.nodes().nodes] == [2], "neither head nor service"
            job = service.client.submit(tiny_job(corpus, "unused", **LONG)).id
            service.until(lambda: service.steps(job))

            for addresses in listening(worker):
                assert set(addresses) == {"*", worker.address}
                assert addresses.count("*") == 1, "Ray's own, which asks for the token"
            assert len(listening(worker)) == 2
            (raylet,) = service.raylets()
            raylet.kill()
            service.until(lambda: "has ended" in service.readiness()[1])
            service.until(lambda: service.readiness()[0] == 200)
            service.until(lambda: service.client.get(job).finished)
            assert service.client.get(job).state == "SUCCEEDED"
            assert service.steps(job) == list(range(1, LONG["training"]["steps"] + 1)), "training went on meanwhile"
        finally:
            raylets = service.raylets()
            service.process.kill()
            service.process.wait()
            _, left = psutil.wait_procs(raylets, timeout=45)
        assert len(raylets) == 1 and not left, "its node goes with it"
