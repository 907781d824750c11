"""Whether a gang delays a job, found out by trying everything: all sets of gangs that may end, and all places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord

Amounts = Mapping[str, float]  # by Ray's names of resources
Place = Mapping[str, Amounts]  # what is taken of which nodes


def usable(nodes: Iterable[NodeCapacity], job: JobRecord) -> list[NodeCapacity]:
    resources = job.spec.resources
    wanted = dict(resources.node_labels)
    if resources.accelerator_type:
        wanted["ray.io/accelerator-type"] = resources.accelerator_type
    return [node for node in nodes if not node.draining and wanted.items() <= node.labels.items()]


def groups(job: JobRecord) -> Iterator[tuple[int, int]]:
    """Of each shape: ranks that share a node, and how many such groups."""
    for shape in job.spec.shapes():
        if job.spec.resources.placement == "STRICT_PACK":
            yield shape.tensor * shape.pipeline, shape.data
        else:
            yield shape.tensor, shape.pipeline * shape.data


def rank_amounts(job: JobRecord) -> dict[str, float]:
    amounts = {"CPU": job.spec.resources.cpus_per_worker, "GPU": job.spec.resources.gpus_per_worker}
    return {name: amount for name, amount in amounts.items() if amount}


def delays(job: JobRecord, nodes: Iterable[NodeCapacity], gangs: Sequence[Place], more: Place) -> bool:
    """Whether there is a set of gangs with whose end a job would fit, if it were not for one more gang."""
    each, used_nodes = rank_amounts(job), usable(nodes, job)
    concerned = [place for place in gangs if any(node.node_id in place for node in used_nodes)]
    stay = (np.arange(2 ** len(concerned))[:, None] >> np.arange(len(concerned))) & 1  # all sets, a row each
    ranks_without, ranks_with = [], []
    for node in used_nodes:
        total, alone = _of(node.total, each), _of(more.get(node.node_id, {}), each)
        free = total - stay @ np.array([_of(place.get(node.node_id, {}), each) for place in concerned]).reshape(
            -1, len(each)
        )
        ranks_without.append(_ranks(free, each))
        ranks_with.append(_ranks(free - alone, each))
    without, beside = _fits(job, ranks_without, len(stay)), _fits(job, ranks_with, len(stay))
    return bool(np.any(without & ~beside))


def _of(amounts: Amounts, each: Amounts) -> np.ndarray:
    return np.array([amounts.get(name, 0) for name in each], dtype=float)


def _ranks(free: np.ndarray, each: Amounts) -> np.ndarray:
    """For how many ranks there is room, by sets."""
    return np.maximum(0, np.floor((free + 1e-6) / np.array(list(each.values()))).min(axis=1))


def _fits(job: JobRecord, ranks: Sequence[np.ndarray], sets: int) -> np.ndarray:
    """Whether one of a job's shapes fits, by sets."""
    found = np.zeros(sets, dtype=bool)
    for size, count in groups(job):
        found |= sum((slots // size for slots in ranks), np.zeros(sets)) >= count
    return found


def places(job: JobRecord, size: int, count: int, nodes: Sequence[NodeCapacity]) -> Iterator[Place]:
    """All ways to place groups of a job where nodes say there is room."""
    group = {name: amount * size for name, amount in rank_amounts(job).items()}
    room = {
        node.node_id: int(min((node.free.get(name, 0) + 1e-6) // amount for name, amount in group.items()))
        for node in usable(nodes, job)
    }
    for numbers in _distributions(list(room.values()), count):
        yield {
            name: {resource: amount * number for resource, amount in group.items()}
            for name, number in zip(room, numbers, strict=True)
            if number
        }


def _distributions(room: list[int], count: int) -> Iterator[list[int]]:
    if not room:
        if count == 0:
            yield []
        return
    for number in range(min(room[0], count) + 1):
        for rest in _distributions(room[1:], count - number):
            yield [number, *rest]
