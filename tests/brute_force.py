"""Whether a gang delays a job, found out by trying everything: all sets of gangs that may end, and all places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

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


def fits(job: JobRecord, nodes: Sequence[NodeCapacity], stay: Sequence[Place]) -> bool:
    """Whether one of a job's shapes has room beside gangs at some places."""
    each, slots = rank_amounts(job), []
    for node in usable(nodes, job):
        left = dict(node.total)
        for place in stay:
            for name, amount in place.get(node.node_id, {}).items():
                left[name] -= amount
        slots.append(int(min((left.get(name, 0) + 1e-6) // amount for name, amount in each.items())))
    return any(sum(max(0, slot) // size for slot in slots) >= count for size, count in groups(job))


def delays(job: JobRecord, nodes: Sequence[NodeCapacity], gangs: Sequence[Place], more: Place) -> bool:
    """Whether there is a set of gangs with whose end a job would fit, if it were not for one more gang."""
    return any(
        fits(job, nodes, stay) and not fits(job, nodes, [*stay, more])
        for number in range(len(gangs) + 1)
        for stay in combinations(gangs, number)
    )


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
