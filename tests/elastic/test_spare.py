"""A job whose ranks are all on one node, and what becomes of it with that node, on real Ray nodes."""

from pathlib import Path

import pytest
import ray
from ray.util.state import list_actors

from boost_core.config import Layout
from tests.elastic.curve import replayed
from tests.elastic.ray_cluster import Job, Nodes, elastic_job, world
from tests.jobs import write_corpus
from tests.ranks import Ranks

pytestmark = pytest.mark.nightly
EVERY = 5  # steps between two copies
NO_CHECKPOINT = {"url": None, "every_steps": 10**6, "keep_last": 1}


def holders(nodes: Nodes) -> list[str]:
    """The nodes on which spare copies are kept."""
    living = [("state", "=", "ALIVE"), ("class_name", "=", "SpareHolder")]
    return [actor.node_id for actor in list_actors(address=nodes.address, filters=living)]


def keeps_a_spare(job: Job, node: str) -> bool:
    return bool(job.of("spare")) and job.of("spare")[-1]["node"] == node


def test_a_node_lost_with_all_ranks_costs_memory_recovery(tmp_path: Path, ranks: Ranks) -> None:
    spec = elastic_job(
        write_corpus(tmp_path / "corpus"),
        replicas=(1, 1),
        checkpoint=NO_CHECKPOINT,
        fault_tolerance={"memory_copy_every_steps": EVERY, "max_restarts": 9},
    )
    with world(tmp_path, nodes=2) as (nodes, service):
        job = Job(service, spec)
        job.trains(1)
        (first,) = set(job.nodes())
        job.until(lambda: job.of("spare"), "a spare copy")
        kept = job.of("spare")[0]
        assert kept["node"] != first
        assert kept["step"] % EVERY == 0
        assert holders(nodes) == [kept["node"]]
        assert ray.available_resources()["CPU"] == 2, "nothing is reserved for it"
        job.until(lambda: job.step >= kept["step"] + 4 * EVERY, "goes on")

        nodes.remove(first)
        job.until(lambda: job.of("restart"), "a restart after the lost node")
        (restart,) = job.of("restart")
        assert (restart["cause"], restart["recovered_from"]) == ("NODE_LOST", "memory")
        assert restart["resumed_step"] >= kept["step"]
        assert set(job.nodes()) == {kept["node"]}
        job.until(lambda: job.of("spare")[-1]["node"] is None, "no node is left for a spare copy")
        job.until(lambda: not holders(nodes), "its process has ended")

        nodes.add()
        job.until(lambda: job.of("spare")[-1]["node"] is not None, "a spare copy on the node that has joined")
        nodes.remove(job.of("spare")[-1]["node"])
        job.until(lambda: job.of("spare")[-1]["node"] is None, "the spare copy is lost")
        step = job.step
        job.until(lambda: job.step >= step + 20, "goes on without")
        assert len(job.of("interruption")) == 1, "a lost spare copy interrupts nobody"
        service.client.cancel(job.id)
        job.until(lambda: job.record.finished, "cancelled")
        job.until(lambda: not nodes.taken(), "nothing is left over")
    losses = job.losses()
    steps = range(1, restart["step"] + 1 + EVERY)  # all that were done again, and some more
    assert replayed(ranks, spec, dict.fromkeys(steps, Layout(2, 1, 1)), tmp_path / "replay") == [
        losses[step] for step in steps
    ]
