"""The order of ranks within a replica."""

import os

import pytest
import torch

from service.gang.assignment import MisplacedRanks, WorkerPlace, ordered, visible_gpus
from service.gang.worker.worker import Worker


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
    with pytest.raises(MisplacedRanks, match="ranks 2 to 3 spans nodes b, c"):
        ordered(places, 2)


def test_ranks_see_the_gpus_of_their_group_in_the_order_of_ranks() -> None:
    groups = [[place("a", 1, "2"), place("a", 2, "3")], [place("b", 3, "GPU-f"), place("b", 4, "GPU-b")]]
    assert visible_gpus(groups) == [("2", "3"), ("2", "3"), ("GPU-f", "GPU-b"), ("GPU-f", "GPU-b")]
    assert visible_gpus([[place("a", 1, "0"), place("a", 2, "0")]]) == [("0",), ("0",)]
    assert visible_gpus([[place("a", 1)], [place("a", 2)]]) == [(), ()]


def test_a_worker_computes_on_its_own_gpu_among_those_it_saw_first(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, chosen = Worker.__new__(Worker), []
    worker._visible, worker.place = (), place("a", 1, "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray has it
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    worker._choose_gpu(("2", "3"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    worker._choose_gpu(("3", "5"))  # CUDA has looked already
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert chosen == [1, 1]


def test_a_worker_on_a_part_of_a_gpu_sees_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA shows a process the first part in its list and no others, even if they are of other GPUs."""
    parts = [place("a", number, f"MIG-{number}0b1c2d3-0000-5000-8000-000000000000") for number in (2, 1)]
    assert ordered(parts, 2) == [1, 0]
    (gpus, _) = visible_gpus([[parts[1], parts[0]]])
    worker, chosen = Worker.__new__(Worker), []
    worker._visible, worker.place = (), parts[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    worker._choose_gpu(gpus)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == parts[0].accelerators[0] == gpus[1]
    assert chosen == [0]
