"""One of several ranks on the mock. Takes a scenario, the rank, their number and a file for the rendezvous."""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist

from boost_core.parallel.mesh import group_of_this_rank
from tests.mock_gpu import control
from tests.mock_gpu.modes import as_on_a_gpu, job, train


def numbers(rank: int, size: int) -> None:
    """Collectives of small tensors have the right results, also in a part of the group, and while captured."""
    total = size * (size + 1) // 2
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64):
        x = torch.full((5,), rank + 1, dtype=dtype).cuda()
        dist.all_reduce(x)
        assert x.tolist() == [total] * 5, (dtype, x)
    for operation, expected in ((dist.ReduceOp.MAX, size), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.AVG, total / size)):
        x = torch.tensor([rank + 1.0]).cuda()
        dist.all_reduce(x, operation)
        assert x.item() == expected, (operation, x)

    mine = torch.tensor([rank, 10.0 * rank]).cuda()
    gathered = torch.empty(2 * size, device="cuda")
    dist.all_gather_into_tensor(gathered, mine)
    assert gathered.view(size, 2).tolist() == [[i, 10.0 * i] for i in range(size)]

    sent = torch.arange(2.0 * size).cuda()
    scattered = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(scattered, sent)
    assert scattered.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)]

    received = torch.empty(size, device="cuda")
    dist.all_to_all_single(received, torch.tensor([10.0 * rank + i for i in range(size)]).cuda())
    assert received.tolist() == [10.0 * i + rank for i in range(size)]
    uneven = torch.empty(1 + 2 * (size - 1) if rank == 0 else size, device="cuda")
    # Rank 0 sends one number to each, the others two to rank 0 and one to each other.
    parts = [1] * size if rank == 0 else [2] + [1] * (size - 1)
    counts = [1] + [2] * (size - 1) if rank == 0 else [1] * size
    dist.all_to_all_single(uneven, torch.full((sum(parts),), float(rank)).cuda(), counts, parts)
    assert uneven.tolist() == [float(i) for i, count in enumerate(counts) for _ in range(count)]

    x = torch.tensor([float(rank)]).cuda()
    dist.broadcast(x, src=size - 1)
    assert x.item() == size - 1

    x, y = torch.tensor([float(rank)]).cuda(), torch.empty(1, device="cuda")
    both = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert y.item() == (rank - 1) % size

    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    x = torch.tensor([rank + 1.0]).cuda()
    if rank // 2 < len(pairs):
        dist.all_reduce(x, group=pairs[rank // 2])
        first = rank // 2 * 2 + 1
        assert x.item() == 2 * first + 1

    pinned, x, graph = torch.zeros(3).pin_memory(), torch.zeros(3).cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        x.copy_(pinned, non_blocking=True)
        dist.all_reduce(x)
    for step in (1, 2):
        pinned.fill_(step * (rank + 1.0))
        graph.replay()
        assert x.tolist() == [step * total] * 3
    graph.reset()


def late(rank: int, size: int) -> None:
    """The others wait for a late rank, and no longer."""
    x = torch.ones(1).cuda()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        control.late(1.5)
    begin = time.monotonic()
    dist.all_reduce(x)
    enqueued = time.monotonic() - begin
    torch.cuda.synchronize()
    waited = time.monotonic() - begin
    assert enqueued < 1, enqueued  # the host does not wait
    assert waited > 1.4, waited
    assert x.item() == size**2


def hang(rank: int, size: int) -> None:
    """A rank that never comes holds the others until they abort, which frees them at once."""
    x = torch.ones(1).cuda()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.all_reduce(x)  # which rank 1 does not begin: its environment says so
    done = torch.cuda.Event()
    done.record()
    time.sleep(1)
    assert not done.query()
    dist.distributed_c10d._abort_process_group()
    done.synchronize()


def abort_of_a_captured_communicator(rank: int, size: int) -> None:
    """An abort frees what waits for its communicator, and returns when the graph that captured it is gone."""
    other = dist.new_group(list(range(size)))
    x, graph = torch.ones(1).cuda(), torch.cuda.CUDAGraph()
    for group in (None, other):
        dist.all_reduce(x, group=group)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for group in (None, other):
            dist.all_reduce(x, group=group)
    if rank == 1:
        control.hang()
    graph.replay()
    ended = threading.Event()

    def abort() -> None:
        dist.distributed_c10d._abort_process_group()
        ended.set()

    threading.Thread(target=abort, daemon=True).start()
    assert not ended.wait(1.5)
    graph.reset()
    assert ended.wait(30)
    torch.cuda.synchronize()


def mismatch(rank: int, size: int) -> None:
    """Ranks that do different collectives hang, and the mock says why."""
    x = torch.ones(4).cuda()
    dist.all_reduce(x[: 2 + rank])
    done = torch.cuda.Event()
    done.record()
    time.sleep(1)
    assert not done.query()
    dist.distributed_c10d._abort_process_group()


def tensor_parallel_steps(rank: int, size: int) -> None:
    """Steps of the trainer, captured and replayed with the collectives of their tensor parallel ranks."""
    with as_on_a_gpu():
        state = train(job("plain", tensor=size), "tensor parallel")
    assert state.graph.obstacle is None, state.graph.obstacle
    state.graph.release("the steps are done")


def data_parallel_steps(rank: int, size: int) -> None:
    """The same with replicas that share the optimizer's state."""
    with as_on_a_gpu():
        state = train(job("plain", tensor=1, data=size), "data parallel")
    assert state.graph.obstacle is None, state.graph.obstacle
    state.graph.release("the steps are done")


def split_groups(rank: int, size: int) -> None:
    """Groups of ranks are made by one split of the gang's communicator, and the savers' connects as it is used."""
    gang = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    splits = gang.comm_split_count()
    halves, ends = group_of_this_rank([[0, 2], [1, 3]]), group_of_this_rank([[0, size - 1]])
    assert gang.comm_split_count() <= splits + 2
    for group, ranks in ((halves, [rank % 2, rank % 2 + 2]), (ends, [0, size - 1])):
        assert (group is not None) == (rank in ranks)
        if group is not None:
            x = torch.tensor([rank + 1.0]).cuda()
            dist.all_reduce(x, group=group)
            assert x.item() == sum(ranks) + len(ranks)

    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as a worker sets it
    savers, told = dist.new_group(backend="gloo"), ["told" if rank == 0 else None]
    dist.broadcast_object_list(told, group=savers)
    assert told == ["told"]
    gathered = [-1] * size
    dist.all_gather_object(gathered, rank, group=savers)
    assert gathered == list(range(size))


SCENARIOS = {
    each.__name__: each
    for each in (
        numbers, late, hang, abort_of_a_captured_communicator, mismatch, tensor_parallel_steps, data_parallel_steps,
        split_groups,
    )
}  # fmt: skip


def main(scenario: str, rank: int, size: int, meeting: str) -> None:
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0) if SCENARIOS[scenario] is split_groups else None
    dist.init_process_group("nccl", store=dist.FileStore(meeting, size), rank=rank, world_size=size, device_id=device)
    SCENARIOS[scenario](rank, size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
