"""What ``layouts: auto`` comes to: held to all layouts there are, and to what the scheduler then orders."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from boost_core.config import JobSpec, Layout
from boost_core.config.job import layout_problems
from boost_core.config.parallelism import MOST_LAYOUTS
from boost_core.hardware import DEVICE_BYTES
from boost_core.plan.machine import SPARE, Basis
from boost_core.plan.memory import rank_memory
from boost_core.plan.report import at, fastest, needed_bytes, nothing_fits, step_seconds
from boost_core.plan.resolve import ChosenLayouts, NothingFits, choose_layouts, fits
from boost_core.plan.search_process import SearchFailed, TooLong, layouts_apart
from service.gang.assignment import End, RankEnd
from service.gang.control import port
from service.jobs.patch import JobPatch, apply, changed_spec
from service.jobs.states import JobState, Reason
from service.scheduler.cluster_snapshot import Gang, Launch, Resize, ResizePolicy
from service.scheduler.decisions import decide
from service.scheduler.demand import demand_of
from tests.jobs import tiny_job
from tests.scheduling import LONG, TRAINING, job, nodes
from tests.unit.fake_gang import START_SECONDS, FakeGang

READY = ResizePolicy(cooldown_seconds=0, settle_seconds=0)
KINDS = ("A100-40G", "A100", "H200")


def content(preset: str = "30b", kind: str | None = "A100", least: int = 1, most: int = 16, **changes: Any) -> dict:
    return {
        "name": "left",
        "model": {"preset": preset, "vocab_size": 32_000, "family": "cola"},
        "parallelism": {"recompute": "auto"},
        "training": {
            "steps": 10, "sequence_length": 4096, "global_batch_size": 48, "micro_batch_size": 1, "precision": "bf16",
        },
        "resources": {"gpus_per_worker": int(kind is not None), "accelerator_type": kind},
        "elasticity": {"layouts": "auto", "gpus": {"min": least, "max": most}},
    } | changes  # fmt: skip


def left(*arguments: Any, **changes: Any) -> JobSpec:
    return JobSpec.model_validate(content(*arguments, **changes))


def test_layouts_that_nodes_have_no_memory_for_are_not_chosen() -> None:
    spec = left("30b", "A100")
    free = choose_layouts(spec)
    has = sorted(layout.node_host_bytes for layout in free.layouts)[0]
    held = choose_layouts(spec, Basis(node_memory_bytes=has))
    assert free.node_memory_bytes is None
    assert held.node_memory_bytes == has
    assert all(layout.node_host_bytes <= has for layout in held.layouts)
    assert held.sizes != free.sizes
    assert demand_of(spec.with_layouts(held.sizes), Basis(node_memory_bytes=has)).layouts == held.sizes
    with pytest.raises(
        NothingFits, match=r"no layout fits the nodes: .* lacks .* set fault_tolerance.memory_copy_every"
    ):
        choose_layouts(spec, Basis(node_memory_bytes=int(1e9)))


@cache
def every_layout(preset: str, kind: str, recompute: str, most: int) -> dict[Layout, float]:
    """Seconds of each layout that a job file could name, and that fits."""
    spec = left(preset, kind, 1, most, parallelism={"recompute": recompute})
    found = {}
    for sizes in product((1, 2, 4, 8), range(1, most + 1), range(1, most + 1)):
        layout = Layout(*sizes)
        way = spec.parallelism.at(layout)
        if layout.world_size > most or layout_problems(spec.model, way, spec.training, spec.optimizer, 1):
            continue
        if rank_memory(at(spec, layout), layout).total <= DEVICE_BYTES[kind] * (1 - SPARE):
            found[layout] = step_seconds(spec, layout)
    return found


@given(
    st.sampled_from(["7b", "30b"]), st.sampled_from(KINDS), st.sampled_from(["none", "auto"]),
    st.tuples(st.integers(1, 16), st.integers(1, 16)), st.lists(st.integers(0, 8), min_size=1, max_size=6),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
@pytest.mark.nightly
def test_the_best_of_those_chosen_is_the_best_there_is(
    preset: str, kind: str, recompute: str, range_of_gpus: tuple[int, int], slots: list[int]
) -> None:
    least, most = sorted(range_of_gpus)
    ways = {
        layout: seconds
        for layout, seconds in every_layout(preset, kind, recompute, 16).items()
        if least <= layout.world_size <= most
    }
    spec = left(preset, kind, least, most, parallelism={"recompute": recompute})
    try:
        chosen = choose_layouts(spec)
    except NothingFits:
        assert not ways
        return
    assert chosen == choose_layouts(spec)
    assert 0 < len(chosen.sizes) <= MOST_LAYOUTS
    resolved = JobSpec.model_validate(spec.with_layouts(chosen.sizes).model_dump(mode="json"))
    assert resolved.layouts() == chosen.sizes
    assert set(chosen.sizes) <= ways.keys()
    assert all(
        (needed_bytes(spec, each), step_seconds(spec, each)) == (told.memory_bytes, told.step_seconds)
        for each, told in zip(chosen.sizes, chosen.layouts, strict=True)
    )

    def best(layouts: Iterable[Layout], slots: list[int]) -> Layout | None:
        return fastest(spec, [each for each in layouts if fits(each, slots)], partial(step_seconds, spec))

    for placed, there in (
        (best(resolved.layouts(), slots), best(ways, slots)),
        (best(resolved.layouts(), [most]), None),
    ):
        if there is not None:
            assert placed is not None and ways[placed] <= ways[there] * (1 + 1e-12)
    quickest = [
        min((ways[each] for each in chosen.sizes if each.world_size <= gpus), default=None)
        for gpus in range(least, most + 1)
    ]
    known = [seconds for seconds in quickest if seconds is not None]
    assert known == sorted(known, reverse=True), "more GPUs make it slower"
    assert demand_of(resolved).layouts == chosen.sizes, "the scheduler takes all of them to fit"


@pytest.mark.full
def test_of_many_those_that_gain_most_are_kept() -> None:
    training = content()["training"] | {"global_batch_size": 5040}
    spec = left("7b", "H100", 1, 96, training=training)
    chosen = choose_layouts(spec)
    assert chosen.timed > 200
    assert len(chosen.sizes) <= MOST_LAYOUTS
    assert chosen.sizes[0] == Layout(1, 1, 1)
    seconds = [layout.step_seconds for layout in chosen.layouts]
    assert max(b / a for a, b in pairwise(seconds)) < 1, "each is faster than all smaller ones"


def test_each_says_why_and_what_it_recomputes() -> None:
    spec = left("30b", "A100", 2, 16, training=content()["training"] | {"global_batch_size": 64})
    chosen = choose_layouts(spec)
    recomputed = [layout.recompute for layout in chosen.layouts]
    assert recomputed == [at(spec, layout).parallelism.recompute_text for layout in chosen.sizes]
    assert "none" in recomputed
    assert any("latent" in each and "none" in each for each in recomputed)
    assert all(layout.why[0].startswith("most of its step is arithmetic") for layout in chosen.layouts)
    said = [why for layout in chosen.layouts for why in layout.why]
    assert any(why.startswith("the next best with no more GPUs, tp ") and "% longer: " in why for why in said)
    assert any(why.endswith(" free GPUs on one node at a time, not 1") for why in said)
    kept = left("30b", "A100", 2, 16, parallelism={"recompute": "none"}, training=spec.training.model_dump(mode="json"))
    said = [why for layout in choose_layouts(kept).layouts for why in layout.why]
    assert any(" would take " in why and why.endswith(" GiB per GPU") for why in said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"most": 3}, ["no layout of 1 to 3 GPUs fits", "more than a GPU", "raise elasticity.gpus.max"]),
        ({"least": 37, "most": 37}, ["no layout of 37 to 37 GPUs is legal", "1, 2, 3, 4, 6, 8, 12", "at most"]),
        ({"kind": "B300"}, ["no figures are known of GPUs named 'B300' (the nearest: B200, GB200"]),
        ({"resources": {"gpus_per_worker": 1}}, ["needs to know the GPU's memory; set resources.accelerator_type to"]),
        ({"most": 65_536, "kind": None, "training": {"steps": 1, "global_batch_size": 735_134_400,
          "micro_batch_size": 1}}, ["1 to 65536 GPUs allow more than 5,000 layouts; narrow the range"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_remedy(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="GPU") as refused:
        choose_layouts(left(**changes))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.nightly
def test_another_process_chooses_the_same_in_time_or_says_why_not() -> None:
    assert layouts_apart(left(), 60) == choose_layouts(left())
    with pytest.raises(NothingFits) as here:
        choose_layouts(left(most=2))
    with pytest.raises(SearchFailed, match="no layout of 1 to 2 GPUs fits") as there:
        layouts_apart(left(most=2), 60)
    assert str(there.value) == str(here.value)
    with pytest.raises(TooLong, match=r"longer than 0\.01 s; narrow elasticity\.gpus"):
        layouts_apart(left(), 0.01)


def test_limits_of_gpus_are_changed_and_those_of_replicas_are_not_there_to_be() -> None:
    spec = left(most=8)
    spec = spec.with_layouts(choose_layouts(spec).sizes)
    wider = JobPatch.model_validate({"gpus": {"max": 16}})
    anew = changed_spec(wider, spec)
    assert anew.lacks_layouts
    changed, differences = apply(wider, spec, choose_layouts(anew).sizes)
    assert differences == {"gpus": {"from": {"min": 1, "max": 8}, "to": {"min": 1, "max": 16}}}
    assert changed.layouts()[-1].world_size > 8
    assert nothing_fits(changed) is None
    renamed, _ = apply(JobPatch(name="other"), spec)
    assert renamed.layouts() == spec.layouts()
    with pytest.raises(ValidationError, match="change gpus instead"):
        apply(JobPatch.model_validate({"data_parallel_size": {"max": 2}}), spec)
    with pytest.raises(ValidationError, match="change data_parallel_size instead"):
        apply(wider, JobSpec.model_validate(content(elasticity={"data_parallel_size": {"max": 2}})))


def tiny() -> tuple[JobSpec, ChosenLayouts]:
    """A job of one to four workers on CPUs."""
    spec = tiny_job(
        "corpus", "checkpoints", parallelism={"tensor_parallel_size": 1, "recompute": "auto"},
        training={"steps": 100, "global_batch_size": 8, "evaluate_every_steps": 100},
        elasticity={"layouts": "auto", "gpus": {"min": 1, "max": 4}}, fault_tolerance={"memory_copy_every_steps": 1},
    )  # fmt: skip
    chosen = choose_layouts(spec)
    return spec.with_layouts(chosen.sizes), chosen


def ordered(spec: JobSpec, gang: Gang | None, *cpus: float) -> Layout | None:
    """The layout that a pass orders on nodes with so many CPUs in all."""
    state, reason = TRAINING if gang else (JobState.QUEUED, Reason.SUBMITTED)
    there = job("a", 1).model_copy(update={"spec": spec, "id": "a", "state": state, "reason": reason})
    total = nodes(*cpus)
    free = [replace(node, free=node.free | {"CPU": 0.0}) for node in total[: gang.allocated]] if gang else []
    actions = decide([there], free + total[len(free) :], {"a": gang} if gang else {}, {"a": LONG}, READY)
    return next((action.layout for action in actions if isinstance(action, Launch | Resize)), None)


def test_a_gang_follows_the_layouts_chosen_as_nodes_come_and_go() -> None:
    spec, chosen = tiny()
    assert [layout.recompute for layout in chosen.layouts] == ["none"] * len(chosen.layouts)
    fastest = {
        ranks: min(
            (each for each in chosen.layouts if each.world_size <= ranks), key=lambda each: each.step_seconds
        )
        for ranks in (1, 2, 4)
    }  # fmt: skip
    assert Layout.of(fastest[4]).world_size > Layout.of(fastest[2]).world_size > 1, "or nothing would be resized"

    start = ordered(spec, None, 1, 1)
    assert start == Layout.of(fastest[2])
    gang = FakeGang(spec, Gang(None, start).orders(spec), "ab")
    gang.wait(START_SECONDS + 1)
    gang.train(3)
    trains = Gang(start, start, unchanged_seconds=LONG)
    larger = ordered(spec, trains, 1, 1, 1, 1)
    assert larger == Layout.of(fastest[4])
    gang.nodes |= set("cd")
    gang.tell(replace(trains, target=larger).orders(spec))
    gang.wait(START_SECONDS + 1)
    gang.end(RankEnd(End.HALTED))
    gang.wait(1)
    gang.train(2)
    smaller = ordered(spec, Gang(larger, larger, unchanged_seconds=LONG), 1)
    assert smaller == Layout.of(fastest[1])
    gang.tell(Gang(larger, smaller, unchanged_seconds=LONG).orders(spec))
    gang.wait(1)
    gang.end(RankEnd(End.HALTED))
    gang.wait(1)

    formed = [report.report for report in gang.record.status(0).reports if report.report.kind == "shape"]
    assert [Layout.of(shape) for shape in formed] == [start, larger, smaller]
    for start_training, layout in zip(gang.of(port.StartTraining), (start, larger, smaller), strict=True):
        (assigned,) = {each.spec.model_dump_json() for each in start_training.assignments}
        told = JobSpec.model_validate_json(assigned)
        assert Layout.of(told.parallelism) == layout
        assert told.training.micro_batches(layout.dp) * told.training.micro_batch_size * layout.dp == 8, (
            "the global batch"
        )
