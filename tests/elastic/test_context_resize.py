"""A gang whose sequences are on more or fewer ranks as nodes come and go, on real Ray nodes behind the real service."""

from pathlib import Path

import pytest

from boost_core.config import Layout
from tests.elastic.curve import replayed
from tests.elastic.ray_cluster import ELASTIC_TRAINING, Job, elastic_job, world
from tests.jobs import write_corpus
from tests.ranks import Ranks

pytestmark = pytest.mark.nightly
ONE, TWO = Layout(1, 1, 1), Layout(1, 1, 1, cp=2)


def test_context_parallel_ranks_go_with_a_node_and_come_back_with_another(tmp_path: Path, ranks: Ranks) -> None:
    """Each loss is bit-equal to that of a job trained in these layouts without a fault."""
    spec = elastic_job(
        write_corpus(tmp_path / "corpus", lines=400),
        parallelism={"tensor_parallel_size": 1, "context_parallel_size": 2},
        # Long enough that the scheduler prefers two ranks.
        training=ELASTIC_TRAINING | {"sequence_length": 1536, "global_batch_size": 2, "micro_batch_size": 1},
        elasticity={"data_parallel_size": {"max": 1}, "layouts": [[1, 1], [1, 1, 1]]},
        checkpoint={"url": None, "every_steps": 5, "keep_last": 2},
    )
    assert spec.layouts() == (ONE, TWO)
    with world(tmp_path, nodes=2, cpus=1) as (nodes, service):
        job = Job(service, spec)
        job.trains(1, context=2)
        nodes.remove(job.nodes()[1])
        job.trains(1, context=1)
        nodes.add()
        job.trains(1, context=2)
        service.client.cancel(job.id)
        job.until(lambda: job.record.finished, "cancelled")
    lost, grown = job.of("restart")
    assert (lost["cause"], lost["recovered_from"]) == ("NODE_LOST", "storage")  # the node had a part of the replica
    assert (grown["cause"], grown["recovered_from"]) == ("NODE_JOINED", "storage")
    assert grown["step"] == grown["resumed_step"], "a planned change loses no step"
    losses, layouts = job.losses(), job.layouts()
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert list(dict.fromkeys(layouts.values())) == [TWO, ONE]
    assert layouts[len(layouts)] == TWO
    assert replayed(ranks, spec, layouts, tmp_path / "replay") == [losses[step] for step in sorted(losses)]
