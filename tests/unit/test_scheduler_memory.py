"""What the scheduler remembers of nodes and jobs from pass to pass."""

from typing import Any

import pytest

from service.gang.status import NodeCapacity
from service.scheduler import cluster_snapshot
from service.scheduler.cluster_snapshot import SchedulerMemory
from service.scheduler.placement import Room
from tests.scheduling import job


def test_nodes_that_differ_only_in_what_no_rank_takes_are_one_class() -> None:
    amounts = [{"CPU": 4.0, f"node:10.0.0.{number}": 1.0, "memory": 1e9 + number} for number in range(3)]
    given = [NodeCapacity(f"node-{number}", each, dict(each)) for number, each in enumerate(amounts)]
    room = Room(given, amounts)
    assert [size for _, size in room.reported_classes()] == [3]
    room.renew([{**each, "memory": 5.0 * number} for number, each in enumerate(amounts)], ())
    assert [size for _, size in room.reported_classes()] == [3]


def test_a_pass_that_fails_leaves_what_is_remembered_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(f"job-{number}", workers=1).with_values({"arrival": number}) for number in range(4)]
    memory = SchedulerMemory()
    memory.see(jobs)
    planned = cluster_snapshot.demand_of

    def demand_of(spec: Any, basis: Any) -> Any:
        if spec is bad.spec:
            raise ValueError("no plan")
        return planned(spec, basis)

    bad = job("job-9", workers=2)
    monkeypatch.setattr(cluster_snapshot, "demand_of", demand_of)
    for _ in range(3):
        with pytest.raises(ValueError, match="no plan"):
            memory.see([*jobs[1:], bad])
    memory.see(jobs[1:])
    assert [entry.job for group in memory.classes.values() for entry in group.queued] == jobs[1:]
    assert list(memory.by_id) == [each.id for each in jobs[1:]]
