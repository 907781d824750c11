"""Nodes on which ranks cannot run: they are named, left alone, and used once they can."""

import subprocess
import time
from pathlib import Path

import pytest

from boost_core import __version__
from tests.elastic.ray_cluster import BOOST, Job, elastic_job, world
from tests.jobs import write_corpus

pytestmark = pytest.mark.nightly


def test_a_node_without_the_trainer_is_not_used_and_says_why(tmp_path: Path) -> None:
    other = tmp_path / "other" / "boost_core"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.9"')
    corpus = write_corpus(tmp_path / "corpus")
    with world(tmp_path, nodes=1) as (nodes, service):
        service.wait()
        bad = nodes.add(PYTHONPATH=str(other.parent))
        deadline = time.monotonic() + 60
        while len(seen := {node.node_id: node for node in service.client.nodes().nodes}) < 2 or (
            seen[bad].unusable in (None, "is being checked")
        ):
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)
        reason = f"has BOOST 0.0.9, but this service has {__version__}"
        assert seen.pop(bad).unusable == reason
        ((good, node),) = seen.items()
        assert node.unusable is None
        shown = subprocess.run([BOOST, "nodes"], env=service.environment, capture_output=True, text=True, check=True)
        assert f"{bad} is not used: it {reason}" in shown.stdout.splitlines()
        job = Job(service, elastic_job(corpus, (1, 2)))
        job.until(lambda: job.step >= 3, "trains", 90)
        assert set(job.nodes()) == {good}
        assert job.replicas == 1, "there is no room for another one"
