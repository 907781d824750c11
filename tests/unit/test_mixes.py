"""Mixes of memory modes: held to all that there are, and to what must hold whatever the memory is."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.architecture import cut
from boost_core.config import JobSpec, Layout
from boost_core.config.parallelism import StageModes
from boost_core.plan.machine import Machine, machine_for
from boost_core.plan.memory import lacking, node_bytes, rank_memory
from boost_core.plan.recompute_mix import RecomputeMixes, legal_modes
from boost_core.plan.report import step_seconds


@cache
def job(family: str, layers: int, tensor: int, pipeline: int, schedule: str = "1f1b", graphs: str = "auto") -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "mixed",
            "model": {"preset": "7b", "vocab_size": 32_000, "family": family, "num_hidden_layers": layers},
            "parallelism": {
                "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "pipeline_schedule": schedule,
            },
            "training": {
                "steps": 1, "sequence_length": 4096, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16",
                "cuda_graphs": graphs,
            },
            "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
        }
    )  # fmt: skip


def needed(spec: JobSpec) -> int:
    return rank_memory(spec, Layout.of(spec.parallelism)).total


def seconds(spec: JobSpec) -> float:
    return step_seconds(spec, Layout.of(spec.parallelism))


@cache
def bounds(spec: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes with the mode that keeps least, and with the one that keeps most."""
    own = job(*spec)
    return needed(own.with_parallelism(recompute="full")), needed(own.with_parallelism(recompute="none"))


def machine(spec: JobSpec, host: float | None = None, bandwidth: float = 25.6e9) -> Machine:
    """An A100 whose host has so many bytes, or an unknown number of them, and so fast a link."""
    on = machine_for(spec.resources, spec.training.precision)
    profile = replace(on.profile, host_bandwidth=bandwidth)
    return replace(on, profile=profile, node_memory_bytes=None if host is None else int(host))


def mixed(
    spec: tuple[Any, ...], share: float, host: float | None = None, bandwidth: float = 25.6e9
) -> tuple[JobSpec, float]:
    """The least costly mix within so much of what lies between the least and the most, and that limit."""
    least, most = bounds(spec)
    limit = least + share * (most - least)
    own = job(*spec)
    return RecomputeMixes(own, Layout.of(own.parallelism), machine(own, host, bandwidth)).least_costly(limit), limit


def every_mix(spec: JobSpec, on: Machine) -> list[tuple[float, int, int]]:
    """Seconds, bytes of the fullest rank's device and bytes of a host whose GPUs all have such ranks, of every mix."""
    sizes = [len(stage.layers) for stage in cut(spec.model, spec.parallelism, spec.training.sequence_length)]
    modes, layout = legal_modes(spec, on), Layout.of(spec.parallelism)
    each = [
        [StageModes(**dict(zip(modes, counts, strict=True))) for counts in product(range(size + 1), repeat=len(modes))
         if sum(counts) == size]
        for size in sizes
    ]  # fmt: skip
    ways = (spec.with_parallelism(recompute=stages) for stages in product(*each))
    memory = ((way, rank_memory(way, layout)) for way in ways)
    gpus = on.cluster.levels[0].fan_out
    return [(step_seconds(way, layout, on), each.total, gpus * (each.host + each.copies)) for way, each in memory]


@pytest.mark.parametrize("spec", [("cola", 5, 4, 1), ("cola", 6, 1, 2), ("lax", 4, 2, 2)], ids=str)
def test_no_mix_that_fits_is_much_faster(spec: tuple[Any, ...]) -> None:
    every = every_mix(job(*spec), machine(job(*spec)))
    for share in (0.05, 0.15, 0.3, 0.5, 0.7, 0.9):
        found, limit = mixed(spec, share)
        assert needed(found) <= limit
        assert seconds(found) <= 1.01 * min(taken for taken, fits, _ in every if fits <= limit)


@pytest.mark.full
@pytest.mark.parametrize(
    "spec",
    [
        ("cola", 5, 4, 1), ("cola", 6, 1, 2), ("svd", 5, 4, 1, "1f1b", "off"),
        pytest.param(("lax", 4, 2, 2), marks=pytest.mark.nightly),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("bandwidth", [25.6e9, 4e9])
def test_no_mix_that_fits_devices_and_hosts_is_much_faster(spec: tuple[Any, ...], bandwidth: float) -> None:
    own = job(*spec)
    every = every_mix(own, machine(own, 1e15, bandwidth))
    least, most = (of(host for _, _, host in every) for of in (min, max))
    for room, share in product((0.3, 0.6, 1), (-0.05, 0.0, 0.05, 0.15, 0.3, 0.6)):
        host = least + room * (most - least)
        found, limit = mixed(spec, share, host, bandwidth)
        on, layout = machine(own, host, bandwidth), Layout.of(own.parallelism)
        fitting = [taken for taken, fits, of_node in every if fits <= limit and of_node <= host]
        memory = rank_memory(found, layout)
        assert bool(fitting) == (memory.total <= limit)
        assert not lacking(node_bytes(memory, layout, on), on)
        if fitting:
            assert step_seconds(found, layout, on) <= 1.01 * min(fitting)


SPECS = st.sampled_from(
    [
        ("cola", 24, 4, 1), ("cola", 24, 1, 1), ("lax", 24, 2, 2), ("svd", 24, 4, 4),
        ("cola", 24, 2, 2, "interleaved_1f1b"), ("cola", 24, 4, 2, "zero_bubble"), ("dense", 24, 2, 2),
    ]
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(SPECS, st.floats(0, 1), st.floats(0, 1))
def test_more_memory_never_gives_a_slower_mix(spec: tuple[Any, ...], share: float, other: float) -> None:
    (tight, limit), (wide, _) = (mixed(spec, each) for each in sorted((share, other)))
    assert seconds(wide) <= seconds(tight) * (1 + 1e-9)
    assert needed(tight) <= limit * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(SPECS, st.floats(-0.05, 0.5), st.sampled_from([25.6e9, 4e9]), st.floats(0, 1), st.floats(0, 1))
def test_more_memory_of_hosts_never_gives_a_slower_mix_nor_one_that_does_not_fit(
    spec: tuple[Any, ...], share: float, bandwidth: float, room: float, other: float
) -> None:
    own = job(*spec)
    layout, on = Layout.of(own.parallelism), machine(own, None, bandwidth)
    memory = rank_memory(own.with_parallelism(recompute="none"), layout)
    least = node_bytes(memory, layout, on)
    taken = []
    for host in (None, *(least + each * 100e9 for each in sorted((room, other)))):
        found, limit = mixed(spec, share, host, bandwidth)
        of_node = node_bytes(rank_memory(found, layout), layout, on)
        assert of_node <= (host or least)
        assert host is not None or not found.parallelism.keeps_on_host
        taken.append(step_seconds(found, layout, on) if needed(found) <= limit else inf)
    assert taken[0] >= taken[1]
    assert taken[1] * 1.005 >= taken[2]  # single blocks, of 24 that differ by a fifth, may stay as they are


def test_blocks_go_to_the_host_only_where_that_is_faster_or_nothing_else_fits() -> None:
    spec = ("cola", 24, 4, 1, "1f1b", "off")
    assert not mixed(spec, 0.9, 1e12)[0].parallelism.keeps_on_host  # others that cost no more
    fast, (slow, _) = mixed(spec, 0.02, 1e12), mixed(spec, 0.02, 1e12, 1e9)
    assert fast[0].parallelism.keeps_on_host
    assert not slow.parallelism.keeps_on_host
    assert "full" in slow.parallelism.recompute_text
    assert seconds(fast[0]) < seconds(mixed(spec, 0.02)[0]) == seconds(slow)
    nothing, limit = mixed(spec, -0.01)
    assert needed(nothing) > limit
    last_resort, limit = mixed(spec, -0.01, 1e12, 1e9)
    assert needed(last_resort) <= limit
    assert last_resort.parallelism.keeps_on_host


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, None),
        ({"resources": {"gpus_per_worker": 0}}, 1e12),
        ({"training": job("cola", 24, 4, 1).training.model_dump() | {"cuda_graphs": "on"}}, 1e12),
        ({"parallelism": {"tensor_parallel_size": 4, "strategy": "vanilla"}}, 1e12),
        ({"parallelism": {"tensor_parallel_size": 4, "norm": "sync"}}, 1e12),
    ],
    ids=["unknown hosts", "CPUs", "captured", "vanilla", "sync"],
)
def test_the_host_keeps_nothing_where_that_is_not_legal_or_its_memory_unknown(
    changes: dict[str, Any], host: float | None
) -> None:
    own = JobSpec.model_validate(job("cola", 24, 4, 1).model_dump() | changes)
    assert "offload" not in legal_modes(own, machine(own, host))
    assert "offload" in legal_modes(job("cola", 24, 4, 1), machine(own, 1e12))


def test_halves_of_one_sequence_recompute_nothing_whatever_the_memory_is() -> None:
    own = job("cola", 24, 4, 1).with_parallelism(split_micro_batch=True, recompute="auto")
    assert legal_modes(own, machine(own, 1e15)) == ["none"]
    least, _ = bounds(("cola", 24, 4, 1))
    found = RecomputeMixes(own, Layout.of(own.parallelism), machine(own, 1e15)).least_costly(least)
    assert JobSpec.model_validate(found.model_dump(mode="json")).parallelism.recompute == "none"
    two = own.model_copy(update={"training": own.training.model_copy(update={"micro_batch_size": 2})})
    assert "latent" in legal_modes(two, machine(two))


def test_the_first_stage_computes_more_again_as_it_has_more_in_hand() -> None:
    found, _ = mixed(("cola", 24, 4, 4), 0.4)
    stages = found.parallelism.recompute
    assert isinstance(stages, tuple)
    kept = [stage.none for stage in stages[:-1]]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
