"""Layouts that do not fit the memory of GPUs are refused at the door, and never ordered."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import ValidationError

from boost_core.config import JobSpec, Layout
from boost_core.config.job import FaultToleranceConfig
from boost_core.config.training import MuonConfig, OptimizerConfig, TrainingConfig
from boost_core.hardware import ACCELERATOR_LABEL, DEVICE_BYTES
from boost_core.plan import report
from boost_core.plan.machine import SPARE, Basis
from boost_core.plan.memory import GIB, rank_memory
from boost_core.plan.report import _IGNORED, at, device_remedies, needed_bytes, nothing_fits, plan, planned_values
from boost_core.plan.resolve import out_of_memory
from service.gang.assignment import node_selector
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.patch import JobPatch, apply
from service.jobs.states import JobState, Reason
from service.scheduler.cluster_snapshot import Gang, Launch, Resize, ResizePolicy
from service.scheduler.decisions import decide
from service.scheduler.demand import Demand, demand_of
from tests.jobs import tiny_job
from tests.scheduling import LONG, STARTING, TRAINING, job

PAIRS = [[1, 1], [2, 1], [4, 1], [8, 1]]
READY = ResizePolicy(cooldown_seconds=0, settle_seconds=0)


def large(kind: str | None = "A100", preset: str = "30b", **changes: Any) -> JobSpec:
    """30B by CoLA in micro-batches of 4: 147 GB a rank at tp 1 × dp 8, 69 GB at tp 4 × dp 2."""
    spec = {
        "name": "large",
        "model": {"preset": preset, "vocab_size": 32_000, "family": "cola"},
        "parallelism": {"tensor_parallel_size": 4, "data_parallel_size": 2, "recompute": "latent"},
        "training": {
            "steps": 10, "sequence_length": 4096, "global_batch_size": 512, "micro_batch_size": 4, "precision": "bf16",
        },
        "resources": {"gpus_per_worker": 1, "accelerator_type": kind},
        "elasticity": {"data_parallel_size": {"min": 1, "max": 8}, "layouts": PAIRS},
    }  # fmt: skip
    return JobSpec.model_validate(spec | changes)


def record(spec: JobSpec, *state: Any, name: str = "a") -> JobRecord:
    state_and_reason = dict(zip(("state", "reason"), state or (JobState.QUEUED, Reason.SUBMITTED), strict=True))
    return job(name, 1).model_copy(update={"spec": spec, "id": name, **state_and_reason})


def gpus(*counts: tuple[str | None, int]) -> list[NodeCapacity]:
    return [
        NodeCapacity(
            f"node-{number}", {"CPU": 64.0, "GPU": float(count)}, {"CPU": 64.0, "GPU": float(count)},
            {ACCELERATOR_LABEL: kind} if kind else {},
        )
        for number, (kind, count) in enumerate(counts)
    ]  # fmt: skip


def launched(spec: JobSpec, nodes: list[NodeCapacity]) -> Layout | None:
    layouts = [action.layout for action in decide([record(spec)], nodes) if isinstance(action, Launch)]
    return layouts[0] if layouts else None


def test_the_fastest_layout_that_fits_is_launched() -> None:
    assert launched(large(), gpus(("A100", 8))) == Layout(4, 1, 2)
    assert launched(large("H200"), gpus(("H200", 8))) == Layout(2, 1, 4)
    assert launched(large("B300"), gpus(("B300", 8))) == Layout(1, 1, 8)  # how much it has is not known


@pytest.mark.parametrize(
    ("nodes", "layout"),
    [
        ([("A100", 8)], Layout(4, 1, 2)),
        ([("H200", 8)], Layout(2, 1, 4)),
        ([("P40", 8)], Layout(1, 1, 8)),  # of which nothing is known
        ([("L4", 8)], None),
        ([("GeForce-RTX-4090", 8)], None),  # as Ray labels them
        ([(None, 8)], Layout(1, 1, 8)),
        ([("A100-40G", 8)], None),
        ([("A100-40G", 8), ("A100", 8)], Layout(4, 1, 2)),
        ([("A100", 2), ("H200", 8)], Layout(2, 1, 4)),
    ],
)
def test_of_a_job_that_names_no_kind_the_nodes_decide(nodes: list[tuple[str, int]], layout: Layout | None) -> None:
    assert launched(large(None), gpus(*nodes)) == layout


def as_it_must(**changes: Any) -> JobSpec:
    return large(**{"parallelism": {"recompute": "auto"}} | changes)


@pytest.mark.parametrize(
    ("kind", "layout", "used"),
    [
        ("A100", Layout(8, 1, 1), {"none", "latent", "shared"}), ("A100", Layout(2, 1, 1), {"full"}),
        ("A100", Layout(1, 1, 1), {"full"}), ("A100", Layout(8, 1, 8), {"none"}), ("H200", Layout(8, 1, 1), {"none"}),
        ("H200", Layout(2, 1, 4), {"none", "latent", "shared"}),
    ],
)  # fmt: skip
def test_each_layout_recomputes_what_it_has_to(kind: str, layout: Layout, used: set[str]) -> None:
    spec = as_it_must(kind=kind)
    found = at(spec, layout)
    assert set(found.parallelism.modes_of_all(spec.model.num_hidden_layers)) == used
    needed = rank_memory(found, layout).total
    assert needed_bytes(spec, layout) == needed
    assert used == {"full"} or needed <= DEVICE_BYTES[kind] * (1 - SPARE)


def test_what_a_layout_recomputes_is_legal() -> None:
    wide = as_it_must(parallelism={"recompute": "auto", "norm": "sync", "tensor_parallel_size": 8})
    assert set(at(wide, Layout(8, 1, 1)).parallelism.modes_of_all(36)) == {"none", "full"}
    halves = as_it_must(parallelism={"recompute": "auto", "split_micro_batch": True})
    assert at(halves, Layout(1, 1, 1)).parallelism.recompute == "latent"
    apart = as_it_must(model={"preset": "30b", "vocab_size": 32_000, "rank": 2047})
    assert not {"shared"} & set(at(apart, Layout(2, 1, 4)).parallelism.modes_of_all(36))


def test_without_a_gpu_nothing_is_recomputed_and_of_one_the_kind_must_be_known() -> None:
    spec = as_it_must(resources={})
    assert at(spec, Layout(1, 1, 1)).parallelism.recompute == "none"
    assert nothing_fits(spec) is None
    for kind in (None, "B300"):
        problem = nothing_fits(as_it_must(kind=kind))
        assert problem is not None
        assert problem.startswith("recompute=auto needs to know the GPU's memory; set resources.accelerator_type to")


@pytest.mark.parametrize("elasticity", [None, {"data_parallel_size": {"min": 65_536, "max": 65_536}, "layouts": PAIRS}])
def test_a_layout_beyond_any_network_is_refused_where_a_plan_would_be(elasticity: dict[str, Any] | None) -> None:
    vast = {"tensor_parallel_size": 16, "data_parallel_size": 65_536, "recompute": "latent"}
    batches = {"steps": 10, "global_batch_size": 65_536, "micro_batch_size": 1, "precision": "bf16"}
    spec = large("H200", preset="7b", parallelism=vast, training=batches, elasticity=elasticity)
    machine = Basis().machine(spec)
    problem = nothing_fits(spec, machine)
    if elasticity is None:
        assert problem == (
            "tp 16 × pp 1 × dp 65536: 1048576 ranks do not fit into 8 (node) × 65536 (fabric); choose smaller sizes, "
            "or a larger network"
        )
        with pytest.raises(ValueError, match="1048576 ranks do not fit into"):
            plan(spec, machine)
    else:  # with 8 tensor parallel ranks it just fits
        assert problem is None
        plan(spec, machine)


def test_a_job_that_may_recompute_starts_where_it_would_not_fit() -> None:
    spec = as_it_must()
    assert set(demand_of(spec).layouts) > set(demand_of(large()).layouts)
    assert launched(spec, gpus(("A100", 4))) == Layout(4, 1, 1)
    assert launched(large(), gpus(("A100", 4))) is None


def test_a_job_that_fits_no_gpu_there_is_waits_and_says_why() -> None:
    greedy = large().training.model_dump() | {"micro_batch_size": 64}
    *_, wait = decide([record(large(None, training=greedy))], gpus(("A100-40G", 8)))
    assert "GiB of memory per rank; the GPUs that it may use have 37.3 GiB" in wait.message
    *_, wait = decide([record(large("A100", training=greedy))], gpus(("A100", 8)))  # of a time before this was refused
    assert "the GPUs that it may use have 74.5 GiB" in wait.message


def test_gangs_grow_shrink_and_fall_back_within_memory() -> None:
    """Whatever a gang of any layout that fits may be ordered, and whatever the kind of GPU."""
    seen = Counter()
    kinds_asked = None, "A100", "H200"
    for kind, nodes in product(kinds_asked, [[("A100", 16)], [("H200", 16)], [("H200", 8), ("A100", 8)]]):
        spec, capacities = large(kind), gpus(*nodes)
        kinds = {node.labels[ACCELERATOR_LABEL] for node in capacities} & ({kind} if kind else set(DEVICE_BYTES))
        for layout in demand_of(spec).layouts:
            if not kinds or needed_bytes(spec, layout) > min(DEVICE_BYTES[each] for each in kinds):
                continue
            gang = Gang(layout, layout, unchanged_seconds=LONG)
            free = [replace(node, free=node.free | {"GPU": node.free["GPU"] / 2}) for node in capacities]
            urgent = record(large(kind).model_copy(update={"priority": 5}), name="b")
            for jobs, there in (([record(spec, *TRAINING)], free), ([record(spec, *TRAINING), urgent], free[:1])):
                for action in decide(jobs, there, {"a": gang}, {"a": LONG, "b": LONG}, READY):
                    if isinstance(action, Launch | Resize):
                        assert needed_bytes(spec, action.layout) <= action.limit
                        on = [DEVICE_BYTES[each] for each in kinds - demand_of(spec).within(action.limit).avoid]
                        assert needed_bytes(spec, action.layout) <= min(on)
                        seen[type(action), kind] += 1
            orders = gang.orders(spec)
            allowed = max(needed_bytes(spec, one) for one in orders.allowed)
            assert all(allowed <= DEVICE_BYTES[each] for each in kinds - set(orders.avoid))
    assert all(seen[action, kind] > 0 for action in (Launch, Resize) for kind in kinds_asked), seen


def test_a_gang_keeps_off_kinds_that_are_too_small_for_it() -> None:
    spec = large(None)
    orders = Gang(None, Layout(2, 1, 4), limit=141e9).orders(spec)
    too_small = sorted(kind for kind, size in DEVICE_BYTES.items() if size < 100e9)
    assert {"A100", "A100-40G", "H100", "L4", "GeForce-RTX-4090"} < set(too_small)
    assert sorted(orders.avoid) == too_small
    assert node_selector(spec, (), orders.avoid) == {ACCELERATOR_LABEL: f"!in({','.join(too_small)})"}
    named = large("H200")
    assert Gang(None, Layout(2, 1, 4), limit=141e9).orders(named).avoid == ()
    assert node_selector(named, ()) == {ACCELERATOR_LABEL: "H200"}
    # The service has been started anew, and knows the gang's layout alone.
    assert Gang(None, Layout(2, 1, 4)).orders(spec).avoid == orders.avoid
    smaller = {kind for kind, size in DEVICE_BYTES.items() if size <= 48e9}
    assert set(Gang(None, Layout(4, 1, 2)).orders(spec).avoid) == smaller


def test_a_gang_without_workers_goes_to_other_gpus_when_its_own_are_gone() -> None:
    waiting = Gang(None, Layout(2, 1, 4), waiting=True, unchanged_seconds=LONG, limit=141e9)
    (resize,) = decide([record(large(None), *TRAINING)], gpus(("A100", 8)), {"a": waiting})
    assert isinstance(resize, Resize)
    assert (resize.layout, resize.limit) == (Layout(4, 1, 2), 80e9)


def test_a_gang_that_starts_takes_no_room_of_gpus_that_it_keeps_off() -> None:
    """Two jobs in one pass: the one that needs H200s leaves the A100s to the other, and the other way round."""
    one, other = record(large(None), *STARTING, name="a"), record(large("A100"), name="b")
    nodes = gpus(("H200", 8), ("A100", 8))
    starting = {"a": Gang(None, Layout(2, 1, 4), limit=141e9)}
    launches = [action for action in decide([one, other], nodes, starting) if isinstance(action, Launch)]
    assert [(launch.job.id, launch.layout) for launch in launches] == [("b", Layout(4, 1, 2))]


def test_no_layout_is_ordered_that_nodes_have_no_memory_for() -> None:
    spec = large("A100", elasticity={"data_parallel_size": {"min": 1, "max": 2}, "layouts": [[4, 1], [4, 2]]})
    needed = {
        layout: min(8, layout.world_size) * rank_memory(spec, layout).copies for layout in demand_of(spec).layouts
    }
    assert len(set(needed.values())) > 1
    for has in needed.values():
        basis = Basis(node_memory_bytes=has)
        found = demand_of(spec, basis)
        assert set(found.layouts) == {layout for layout, size in needed.items() if size <= has}
        assert demand_of(spec.model_copy(), basis.model_copy(update={"fitted": None})) is found
        target = found.layouts[-1]
        assert set(Gang(None, target).orders(spec, basis).allowed) <= set(found.layouts)
    nothing = demand_of(spec, Basis(node_memory_bytes=1))
    assert not nothing.layouts
    assert nothing.lacks_hosts
    without = spec.model_copy(update={"fault_tolerance": FaultToleranceConfig(memory_copy_every_steps=None)})
    least = min(needed.values())
    assert len(demand_of(without, Basis(node_memory_bytes=least)).layouts) == len(needed), "another demand"


def any_specs(count: int) -> Iterator[JobSpec]:
    """Legal jobs of all kinds, the same ones each time."""
    choice = Random(0).choice
    while count:
        family, kind = choice(["dense", "svd", "cola", "lax"]), choice(["adamw", "loro", "muon"])
        stages = choice([1, 2])
        with suppress(ValidationError):
            yield tiny_job(
                Path("corpus"), "checkpoints",
                model={"family": family, "rank": None if family == "dense" else 8},
                parallelism={
                    "tensor_parallel_size": choice([1, 2]), "pipeline_parallel_size": stages,
                    "data_parallel_size": choice([1, 2]), "recompute": choice(["none", "full", "auto"]),
                    "zero_stage": choice([0, 1, 2]), "optimizer_offload": choice([0.0, 0.5]),
                },
                training={"precision": choice(["fp32", "bf16"]), "global_batch_size": 16},
                optimizer={"kind": kind, "weight_decay": choice([0.0, 0.1])},
                resources=choice([{}, {"gpus_per_worker": 1}, {"gpus_per_worker": 1, "accelerator_type": "A100"}]),
                elasticity=choice([None, {"data_parallel_size": {"min": 1, "max": 4}}]),
            )  # fmt: skip
            count -= 1


def test_a_demand_reads_none_of_the_fields_in_which_those_of_equal_demand_may_differ() -> None:
    basis = Basis(node_gpus=8, node_memory_bytes=2 * 10**12)
    for spec in any_specs(40):
        parts = {"training": spec.training.model_copy(), "optimizer": spec.optimizer.model_copy()}
        bare = spec.model_copy(update=parts)
        for part in parts.values():  # where a field is missing, reading it is an error
            for name in _IGNORED & part.__dict__.keys() - {"weight_decay", "muon"}:
                del part.__dict__[name]
        decays = bare.optimizer.weight_decay > 0
        bare.optimizer.__dict__.update(weight_decay=7.0 * decays, muon=spec.optimizer.muon and MuonConfig(momentum=0.1))
        expected = Demand(spec, basis=basis)
        report._resolved.cache_clear()  # or it would find what was worked out for the other
        found = Demand(bare, basis=basis)
        for name in ("layouts", "limit", "avoid", "kind", "least_bytes", "lacks_hosts", "in_words"):
            assert getattr(found, name) == getattr(expected, name), name
        assert list(map(found.seconds, found.layouts)) == list(map(expected.seconds, expected.layouts))


def test_jobs_that_differ_only_in_what_no_plan_depends_on_have_one_demand() -> None:
    spec = large()
    for section in ("training", "optimizer"):
        part = getattr(spec, section)
        for name, value in part:  # new fields, too, unless they are listed
            other = spec.model_copy(update={section: part.model_copy(update={name: 0.5 if value != 0.5 else 0.6})})
            assert (planned_values(other) == planned_values(spec)) == (name in _IGNORED), name
    assert {*TrainingConfig.model_fields, *OptimizerConfig.model_fields} > _IGNORED
    undecayed = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"weight_decay": 0.0})})
    assert planned_values(undecayed) != planned_values(spec)
    training = spec.training.model_copy(update={"seed": 7, "steps": 99})
    other = spec.model_copy(update={"training": training, "optimizer": OptimizerConfig(learning_rate=0.5)})
    assert demand_of(other) is demand_of(spec)


def test_what_fits_no_gpu_is_refused_with_a_remedy() -> None:
    assert nothing_fits(large()) is None
    assert nothing_fits(large(None)) is None
    problem = nothing_fits(large("A100-40G", preset="40b"))
    assert problem is not None
    for words in ("no layout fits", "of 37.3 GiB", "raise parallelism.tensor_parallel_size", "micro_batch_size=4"):
        assert words in problem


def test_a_rank_out_of_memory_learns_what_was_planned_what_there_was_and_what_would_fit() -> None:
    spec = large(preset="7b", parallelism={"tensor_parallel_size": 4, "recompute": "none"})
    layout, training = Layout.of(spec.parallelism), spec.training
    planned = rank_memory(spec, layout).total
    said = out_of_memory(spec, 2 * GIB, planned - GIB, planned, GIB // 10, planned + 20 * GIB)
    factor = (planned + GIB) / planned  # the plan was too low by as much
    half = spec.model_copy(update={"training": training.model_copy(update={"micro_batch_size": 2})})
    smaller, leaner = (
        factor * rank_memory(half, layout).total,
        rank_memory(spec.with_parallelism(recompute="latent"), layout),
    )
    assert said == (
        f"out of GPU memory: 2.00 GiB were requested. Planned were {planned / GIB:.1f} GiB for the fullest rank; torch "
        f"had allocated {planned / GIB - 1:.1f} GiB and reserved {planned / GIB:.1f} GiB of {planned / GIB + 20:.1f} "
        f"GiB, 0.1 GiB were free, and other processes and libraries had 19.9 GiB. By the plan, "
        f"training.micro_batch_size=2 ({smaller / GIB:.1f} GiB) or parallelism.recompute=latent "
        f"({factor * leaner.total / GIB:.1f} GiB) would fit"
    )
    crowded = out_of_memory(spec, 10**9, 10**9, 10**9, 0, planned)
    assert crowded.endswith("set parallelism.optimizer_offload=1 as a last resort")
    assert "would fit" not in crowded and "lower training.micro_batch_size=4" in crowded


@pytest.mark.parametrize(("size", "smaller"), [(2, False), (4, True)])
def test_halves_are_not_told_to_be_of_one_sequence(size: int, smaller: bool) -> None:
    split = {"context_parallel_size": 4, "split_micro_batch": True, "recompute": "latent"}
    training = {"steps": 10, "sequence_length": 4096, "global_batch_size": 4, "micro_batch_size": size}
    spec = large(preset="7b", parallelism=split, training=training | {"precision": "bf16"}, elasticity=None)
    layout = Layout.of(spec.parallelism)
    planned = rank_memory(spec, layout).total
    roomy = out_of_memory(spec, 0, planned, planned, 0, planned)  # what saves a little would fit
    assert ("training.micro_batch_size=2" in roomy) == smaller
    assert "training.micro_batch_size=1" not in roomy
    assert ("leave parallelism.split_micro_batch out" in device_remedies(spec, layout)) != smaller


def test_replicas_are_not_limited_to_numbers_that_do_not_fit() -> None:
    # A captured step leaves room for an evaluation, and would not fit four replicas.
    training = large().training.model_dump() | {"cuda_graphs": "off"}
    elasticity = {"data_parallel_size": {"min": 2, "max": 8}, "layouts": [[8, 1]]}
    spec = large("A100-40G", elasticity=elasticity, training=training)
    changed, _ = apply(JobPatch.model_validate({"data_parallel_size": {"max": 4}}), spec)
    assert nothing_fits(changed) is None
    with pytest.raises(ValidationError, match="no layout fits") as refused:
        apply(JobPatch.model_validate({"data_parallel_size": {"min": 1, "max": 1}}), spec)
    assert [error["loc"] for error in refused.value.errors()] == [("elasticity", "data_parallel_size")]
