"""Whether a gang delays a job, found out by trying everything: all sets of gangs that may end, and all places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

import numpy as np

from boost_core.config import JobSpec, Layout
from boost_core.plan.memory import rank_memory
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord

Amounts = Mapping[str, float]  # by Ray's names of resources
Place = Mapping[str, Amounts]  # what is taken of which nodes


KIND = "ray.io/accelerator-type"
BYTES = {"A100-40G": 40e9, "H100": 80e9}  # of the kinds of GPU that there are in simulated clusters; of others, unknown


_NEEDED: dict[int, tuple[JobSpec, dict[Layout, int]]] = {}  # by identity, so that looking it up costs nothing


def needed(job: JobRecord) -> dict[Layout, int]:
    """What a rank needs of its GPU, by layouts."""
    spec = job.spec
    if id(spec) not in _NEEDED:
        gpus = spec.resources.gpus_per_worker
        _NEEDED[id(spec)] = spec, {layout: rank_memory(spec, layout).total if gpus else 0 for layout in spec.layouts()}
    return _NEEDED[id(spec)][1]


def memory(labels: Mapping[str, str]) -> float:
    """What a node's GPUs have; of kinds that are not known, any."""
    return BYTES.get(labels.get(KIND, ""), inf)


def layouts(job: JobRecord, limit: float = inf) -> list[Layout]:
    """Those at which a rank needs so many bytes at most, and no more than the kind of GPU has that the job names."""
    kind = job.spec.resources.accelerator_type
    most = min(limit, BYTES.get(kind, inf) if kind else inf)
    return [layout for layout, size in needed(job).items() if size <= most]


def usable(nodes: Iterable[NodeCapacity], job: JobRecord, limit: float = inf) -> list[NodeCapacity]:
    """The nodes that a gang within a limit can be on at any of its layouts."""
    resources = job.spec.resources
    wanted = dict(resources.node_labels)
    if resources.accelerator_type:
        wanted[KIND] = resources.accelerator_type
    most = max((needed(job)[layout] for layout in layouts(job, limit)), default=0)
    return [
        node
        for node in nodes
        if not node.draining and wanted.items() <= node.labels.items() and most <= memory(node.labels)
    ]


def groups(job: JobRecord, limit: float = inf) -> Iterator[tuple[int, int]]:
    """Of each layout: ranks that share a node, and how many such groups."""
    for layout in layouts(job, limit):
        if job.spec.resources.placement == "STRICT_PACK":
            yield layout.tp * layout.pp, layout.dp
        else:
            yield layout.tp, layout.pp * layout.dp


def rank_amounts(job: JobRecord) -> dict[str, float]:
    amounts = {"CPU": job.spec.resources.cpus_per_worker, "GPU": job.spec.resources.gpus_per_worker}
    return {name: amount for name, amount in amounts.items() if amount}


def delays(
    job: JobRecord, nodes: Iterable[NodeCapacity], gangs: Sequence[Place], more: Place, limit: float = inf
) -> bool:
    """Whether there is a set of gangs with whose end a job would fit, if it were not for one more gang."""
    each, used_nodes = rank_amounts(job), usable(nodes, job, limit)
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
    without, beside = _fits(job, ranks_without, len(stay), limit), _fits(job, ranks_with, len(stay), limit)
    return bool(np.any(without & ~beside))


def _of(amounts: Amounts, each: Amounts) -> np.ndarray:
    return np.array([amounts.get(name, 0) for name in each], dtype=float)


def _ranks(free: np.ndarray, each: Amounts) -> np.ndarray:
    """For how many ranks there is room, by sets."""
    return np.maximum(0, np.floor((free + 1e-6) / np.array(list(each.values()))).min(axis=1))


def _fits(job: JobRecord, ranks: Sequence[np.ndarray], sets: int, limit: float) -> np.ndarray:
    """Whether one of a job's layouts fits, by sets."""
    found = np.zeros(sets, dtype=bool)
    for size, count in groups(job, limit):
        found |= sum((slots // size for slots in ranks), np.zeros(sets)) >= count
    return found


def places(job: JobRecord, size: int, count: int, nodes: Sequence[NodeCapacity], limit: float = inf) -> Iterator[Place]:
    """All ways to place groups of a job where nodes say there is room."""
    group = {name: amount * size for name, amount in rank_amounts(job).items()}
    room = {
        node.node_id: int(min((node.free.get(name, 0) + 1e-6) // amount for name, amount in group.items()))
        for node in usable(nodes, job, limit)
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
