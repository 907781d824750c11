"""The order of ranks within a replica."""

import pytest

from service.gang.assignment import MisplacedRanks, WorkerPlace, ordered


def place(node: str, pid: int, *accelerators: str) -> WorkerPlace:
    return WorkerPlace(node, f"address of {node}", accelerators, pid, f"host of {node}", "actor")


ORDERS: dict[str, tuple[list[WorkerPlace], int, list[int]]] = {
    "by GPU": ([place("a", 1, "3"), place("a", 2, "0"), place("a", 3, "10"), place("a", 4, "2")], 4, [1, 3, 0, 2]),
    "by process without GPUs": ([place("a", 30), place("a", 10), place("a", 20)], 3, [1, 2, 0]),
    "by process on a shared GPU": ([place("a", 30, "1"), place("a", 10, "1"), place("a", 20, "0")], 3, [2, 1, 0]),
    "by names of GPUs": ([place("a", 1, "GPU-f"), place("a", 2, "GPU-b")], 2, [1, 0]),
    "groups one after the other": (
        [place("b", 4, "1"), place("b", 3, "0"), place("a", 2, "1"), place("a", 1, "0")], 2, [1, 0, 3, 2],
    ),
    "groups of one as they are": ([place("b", 9), place("a", 1)], 1, [0, 1]),
    "nobody": ([], 2, []),
}  # fmt: skip


@pytest.mark.parametrize(("places", "tensor", "order"), ORDERS.values(), ids=ORDERS)
def test_ranks_are_ordered(places: list[WorkerPlace], tensor: int, order: list[int]) -> None:
    assert ordered(places, tensor) == order


def test_a_group_on_two_nodes_is_refused_by_name() -> None:
    places = [place("a", 1), place("a", 2), place("c", 3), place("b", 4)]
    assert ordered(places[:2], 2) == [0, 1]
    with pytest.raises(MisplacedRanks, match="ranks 2 to 3 lies on nodes b, c"):
        ordered(places, 2)
