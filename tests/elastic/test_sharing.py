"""Two jobs on one pool."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.ray_cluster import ELASTIC_TRAINING, Job, Nodes, Service, elastic_job, world
from tests.jobs import write_corpus

pytestmark = pytest.mark.nightly


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[tuple[Nodes, Service]]:
    with world(tmp_path, nodes=2) as parts:
        yield parts


def test_a_job_of_higher_priority_gets_room_and_gives_it_back(pool: tuple[Nodes, Service], tmp_path: Path) -> None:
    _, service = pool
    corpus = write_corpus(tmp_path / "corpus")
    low = Job(service, elastic_job(corpus, replicas=(1, 2)))
    low.trains(2)
    high = Job(service, elastic_job(corpus, replicas=(1, 1), priority=5, training=ELASTIC_TRAINING | {"steps": 40}))
    high.until(lambda: high.record.finished, "the urgent one is done")
    assert high.record.state == "SUCCEEDED"
    low.trains(2)
    causes = [restart["cause"] for restart in low.of("restart")]
    assert causes[0] == "PREEMPTED"
    assert all(restart["step"] == restart["resumed_step"] for restart in low.of("restart"))
    # All of the pool: the other one is paused, for it cannot shrink below one replica.
    both = Job(service, elastic_job(corpus, replicas=(2, 2), priority=5, training=ELASTIC_TRAINING | {"steps": 20}))
    both.until(lambda: both.record.finished, "the urgent one is done")
    assert both.record.state == "SUCCEEDED"
    low.trains(2)
    reasons = [event["reason"] for event in low.of("state")]
    assert "PAUSED_FOR_PRIORITY" in reasons
    steps = sorted(low.losses())
    assert steps == list(range(1, steps[-1] + 1))
    assert sum(event["step"] in steps for event in low.of("progress")) == len(steps), "no step was lost"
