"""Collectives that the benchmark times at each level of a network, among ranks of two nodes. Times are made up."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from boost_core.bench import __main__ as bench
from boost_core.bench import comm
from boost_core.hardware import Link
from boost_core.plan.machine import MeasuredLink, MeasuredProfile
from boost_core.plan.throughput import link_bytes
from tests.ranks import Ranks
from tests.unit.test_profile import MEASURED

CPU, LARGEST = torch.device("cpu"), 1 << 12
ALPHA, INSIDE, BETWEEN = 1e-5, 8e9, 2e9  # seconds, and bytes per second at both levels


def made_up_seconds(call: Callable[[], object], *_: object) -> list[float]:
    """Make the call, and return what it would take: between nodes, one group has the switch for itself."""
    call()
    if not isinstance(call, partial):
        return [1.0, 1.0]
    payload, group = call.args
    adjacent = dist.get_process_group_ranks(group)[1] - dist.get_process_group_ranks(group)[0] == 1
    seconds = ALPHA + link_bytes("all_reduce", group.size(), payload.nbytes) / (INSIDE if adjacent else BETWEEN)
    return [seconds, seconds]


@dataclass(frozen=True)
class Measured:
    """A level, as one rank measures it."""

    name: str
    ranks: int
    groups: int
    first: bool
    link: Link
    cases: frozenset[str]


def measured(ranks_per_node: int) -> list[Measured]:
    place = dist.get_rank() % ranks_per_node
    with (
        patch.object(comm, "_seconds", made_up_seconds),
        patch.object(dist, "get_node_local_rank", lambda fallback_rank: place),
    ):
        found = []
        for level in comm.levels(CPU):
            link, rows = comm.comm_rows(level, CPU, LARGEST, 2)
            cases = frozenset(row.case for row in rows)
            found.append(Measured(level.name, level.ranks, level.groups, level.first, link, cases))
        return found


@pytest.mark.full
def test_ranks_of_two_nodes_are_timed_inside_and_between(ranks: Ranks) -> None:
    for rank, (inside, between) in enumerate(ranks.run(4, measured, 2)):
        assert (inside.name, inside.ranks, inside.groups, inside.first) == ("node", 2, 2, rank < 2)
        assert (between.name, between.ranks, between.groups, between.first) == ("between nodes", 2, 2, rank % 2 == 0)
        for level, rate in ((inside, INSIDE), (between, BETWEEN)):
            assert (level.link.base_seconds, level.link.bytes_per_second) == pytest.approx((ALPHA, rate))
        for operation in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
            for size in (1024, 4096):
                assert f"{operation} of {size} bytes among 2 ranks (gloo), between nodes" in between.cases
        assert "all-reduce of 4096 bytes among 2 ranks (gloo), between nodes, one group alone" in between.cases


@pytest.mark.full
def test_ranks_of_one_node_are_one_level(ranks: Ranks) -> None:
    for (level,) in ranks.run(3, measured, 3):
        assert (level.name, level.ranks, level.groups, level.first) == ("node", 3, 1, True)
        assert level.link.bytes_per_second == pytest.approx(INSIDE)
        assert not any("alone" in case for case in level.cases)


@pytest.mark.full
def test_nodes_need_the_same_number_of_ranks(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"different numbers of ranks, \[0, 1, 0\] by place"):
        ranks.run(3, measured, 2)


def refusal_without_memory() -> str:
    """Why rank 0's node, which has symmetric memory, does not use it: rank 1's has none."""
    answer = (None, "its GPUs are apart") if dist.get_rank() else (object(), None)
    level = comm.Level("node", dist.group.WORLD, 1, 2, True)
    with (
        patch.object(comm, "connect", lambda *_: answer),
        patch.object(comm, "_seconds", lambda *_: [1.0]),
        pytest.raises(ValueError) as refused,
    ):
        comm.symmetric_rows(level, CPU, LARGEST, 1)
    return str(refused.value)


def test_symmetric_memory_that_one_node_lacks_is_timed_on_none(ranks: Ranks) -> None:
    assert ranks.run(2, refusal_without_memory) == ["no symmetric memory: its GPUs are apart"] * 2


def refusal_of_profile(path: Path) -> str:
    """What a rank says before anything is measured; there is nothing to measure."""
    profile = path if dist.get_rank() == 0 else path.parent
    options = argparse.Namespace(profile=profile)
    with (
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
        pytest.raises(ValueError) as refused,
    ):
        bench._comm(options, CPU)
    return str(refused.value)


def test_a_profile_is_refused_on_all_ranks_before_anything_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for said in ranks.run(2, refusal_of_profile, path):
        assert said == f"no profile at {path}; write one with boost bench profile --out {path}"
    path.write_text("{}")
    first, second = ranks.run(2, refusal_of_profile, path)
    assert first == second and "product_flops" in first


def test_links_are_added_to_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(MEASURED.model_dump_json())
    link = MeasuredLink(ranks=2, base_seconds=ALPHA, bytes_per_second=INSIDE, overlap=0.5)
    bench._add_links(path, {"link": link, "between_nodes": link})
    assert MeasuredProfile.model_validate_json(path.read_text()) == MEASURED.model_copy(
        update={"link": link, "between_nodes": link}
    )


def test_links_without_a_rate_are_refused() -> None:
    level = comm.Level("node", None, 2, 1, True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="larger all-reduces took no longer"):
        comm.measured_link(level, CPU, Link(ALPHA, 0.0, float("inf"), "made up"), 2)
