"""What a search finds: held to all ways there are, and to what must hold whatever the machine is."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from math import inf, nan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from typer.testing import CliRunner

from boost_core.config import JobSpec, Layout
from boost_core.config.base import in_lines
from boost_core.config.parallelism import StageModes
from boost_core.plan import search as module
from boost_core.plan.machine import (
    SPARE,
    Correction,
    Fitted,
    Machine,
    NetworkConfig,
    ShapeCorrection,
    machine_of,
    shape_of,
)
from boost_core.plan.memory import PipelineRank, rank_memory
from boost_core.plan.report import plan, step_parts, step_seconds
from boost_core.plan.resolve import fits
from boost_core.plan.search import (
    NEAR_TIE,
    Choice,
    PlanSearch,
    longer,
    other_orders,
    reasons,
    search,
    search_as_reported,
    search_report,
    sensitivities,
    simplest_first,
)
from boost_core.plan.search_process import SearchFailed, TooLong, search_apart
from boost_core.plan.throughput import ORDER, Step, StepParts
from boost_core.terminal import rounded, size_in_words
from service.cli.main import app
from tests.planning_truth import drawn, fastest, replayed_parts


def job(preset: str = "3b", batch: int = 32, **changes: Any) -> JobSpec:
    spec = {
        "name": "searched",
        "model": {"preset": preset, "vocab_size": 32_000, **changes.pop("model", {})},
        "training": {"steps": 10, "sequence_length": 4096, "global_batch_size": batch, "micro_batch_size": 1,
                     "precision": "bf16"},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
    }  # fmt: skip
    return JobSpec.model_validate(spec | changes)


# Where attention has the same kernel with and without context parallelism, which on later GPUs costs cuDNN's.
A100 = {"gpus_per_worker": 1, "accelerator_type": "A100"}


def network(node: int, inside: float, outside: float) -> NetworkConfig:
    levels = [
        {"name": "node", "fan_out": node, "gigabytes_per_second": inside},
        {"name": "fabric", "fan_out": 1024, "gigabytes_per_second": outside},
    ]
    return NetworkConfig.model_validate({"levels": levels})


def machine(
    spec: JobSpec, node: int = 8, inside: float = 450, outside: float = 50, host: float | None = None
) -> Machine:
    on = machine_of(spec, cluster=network(node, inside, outside).cluster())
    return replace(on, node_memory_bytes=None if host is None else int(host))


@cache
def every_way(batch: int, gpus: int, node: int) -> list[tuple[float, int, int, bool]]:
    """Seconds and bytes of every legal way, whatever is used of the GPUs; legal is what a job file may say.

    Of the bytes, those of the fullest rank's device and those of a node's host; and whether state or activations are
    on the host.
    """
    spec = job(batch=batch)
    return list(_every_way(spec, gpus, machine(spec, node)))


def _every_way(spec: JobSpec, gpus: int, on: Machine) -> Iterator[tuple[float, int, int, bool]]:
    content = spec.model_dump(mode="json")
    schedules = ("1f1b", "interleaved_1f1b", "zero_bubble")
    held = ((1, 0), (2, 0), (1, 1))  # ZeRO's stage, and the share of the optimizer's state on the host
    for tensor, pipeline, replicas in product((1, 2, 4, 8), range(1, gpus + 1), range(1, gpus + 1)):
        if tensor * pipeline * replicas > gpus or tensor > on.cluster.levels[0].fan_out:
            continue
        for micro, schedule, recompute, (zero, share) in product(
            (1, 2, 3, 4), schedules, ("none", "latent", "full", "offload"), held
        ):
            parallelism = {
                "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": replicas,
                "pipeline_schedule": schedule, "recompute": recompute, "zero_stage": zero, "optimizer_offload": share,
            }  # fmt: skip
            try:
                way = JobSpec.model_validate(
                    content
                    | {"parallelism": parallelism, "training": content["training"] | {"micro_batch_size": micro}}
                )
            except ValidationError:
                continue
            layout = Layout(tensor, pipeline, replicas)
            memory = rank_memory(way, layout)
            of_node = min(layout.world_size, on.cluster.levels[0].fan_out) * (memory.host + memory.copies)
            yield replayed_parts(way, layout, on).total, memory.total, of_node, share > 0 or recompute == "offload"


@pytest.mark.parametrize(("batch", "gpus", "node"), [(16, 4, 2), pytest.param(12, 6, 4, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_nothing_that_fits_is_faster_than_what_is_found(
    batch: int, gpus: int, node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SEQUENCES", 4)
    spec = job(batch=batch)
    ways = every_way(batch, gpus, node)
    for device, host in product((20e9, 30e9, 45e9, 60e9, 80e9, 200e9), (None, 70e9, 140e9, 200e9)):
        found = search(spec, gpus, machine(spec, node, host=host), device, 1)
        fitting = [
            seconds
            for seconds, needed, of_node, on_host in ways
            if needed <= device * (1 - SPARE) and (not on_host if host is None else of_node <= host)
        ]
        assert bool(found.choices) == bool(fitting)
        if fitting:  # with the default cut
            assert found.choices[0].seconds.total <= min(fitting) * (1 + 1e-9)
            assert found.choices[0].needed <= device * (1 - SPARE)
            assert host is None or found.choices[0].host <= host


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 3, 4, 6, 11, 16, 19])
def test_random_instances_are_planned_as_brute_force_has_them(seed: int) -> None:
    small = drawn(seed, layers=6, gpus=8)
    choices = search(small.job, small.gpus, small.machine, small.device_bytes, 1).choices
    best = fastest(small, all_cuts=False)
    assert bool(choices) == (best < inf)
    if choices:
        assert choices[0].seconds.total <= best * (1 + 1e-9)


@pytest.mark.full
@pytest.mark.parametrize(("seed", "uses"), [(6, False), (42, True), (16, False), (37, True)])
def test_blocks_on_the_host_are_planned_as_brute_force_has_them(seed: int, uses: bool) -> None:
    small = drawn(seed, layers=6, gpus=4, hosts=True)
    (found,) = search(small.job, small.gpus, small.machine, small.device_bytes, 1).choices
    assert found.job.parallelism.keeps_on_host == uses
    assert found.host <= (small.machine.node_memory_bytes or 0)
    assert found.seconds.total <= fastest(small, all_cuts=False) * (1 + 1e-9)
    unknown = replace(small.machine, node_memory_bytes=None)
    for without in search(small.job, small.gpus, unknown, small.device_bytes, 1).choices:
        assert found.seconds.total <= without.seconds.total
        assert not without.job.parallelism.keeps_on_host


@pytest.mark.parametrize(("own", "least"), [(1, 15), (15, 15), (45, 45)])
def test_micro_batches_that_are_no_powers_of_two_are_tried_and_the_jobs_own(own: int, least: int) -> None:
    training = {"steps": 10, "sequence_length": 256, "global_batch_size": 135, "precision": "bf16"}
    odd = {size: job("1b", training=training | {"micro_batch_size": size}, resources=A100) for size in (own, least)}
    (best,) = search(odd[own], 1, machine(odd[own]), 80e9, 1).choices
    assert best.seconds.total <= step_seconds(odd[least], Layout(1, 1, 1), machine(odd[own]))


def test_a_replica_has_a_node_where_placement_says_so() -> None:
    layouts = {}
    for placement in ("PACK", "STRICT_PACK"):
        spec = job(batch=8, resources={**A100, "placement": placement})
        choices = search(spec, 4, machine(spec, node=2), 20e9, 5).choices
        layouts[placement] = [choice.layout for choice in choices]
        assert choices and all(fits(layout, [2, 2], placement) for layout in layouts[placement])
    assert not all(fits(layout, [2, 2], "STRICT_PACK") for layout in layouts["PACK"])


OWN = Layout(2, 2, 1)


@pytest.mark.parametrize(("choices", "first"), [
    ([(Layout(1, 1, 8), 1.0), (Layout(4, 2, 1), 1.04), (Layout(1, 1, 4), 1.06)], 0),  # the simplest
    ([(Layout(1, 1, 8), 1.0), (Layout(2, 2, 1), 1.03), (Layout(1, 1, 4), 1.04)], 1),  # the fewest GPUs, and own
    ([(Layout(1, 1, 8), 1.0), (Layout(2, 2, 2), 1.03), (Layout(1, 4, 1), 1.04)], 2),  # GPUs before the job's own layout
    ([(Layout(2, 2, 2), 1.0), (Layout(1, 1, 8), 1.04)], 0),  # own replicas, of which there may be more
    ([], None),
])  # fmt: skip
def test_of_what_is_about_as_fast_the_fewest_gpus_come_first_then_the_jobs_own_layout_then_the_simplest(
    choices: list[tuple[Layout, float]], first: int | None
) -> None:
    given = []
    for layout, seconds in choices:
        parts = StepParts(arithmetic=seconds, exchange=0, sends=0, idle=0, reduction=0, update=0)
        given.append(Choice(job().with_parallelism(**layout.sizes), parts, 0))
    ordered = simplest_first(given, OWN)
    assert [*ordered] == ([] if first is None else [given[first], *given[:first], *given[first + 1 :]])


def test_of_choices_about_as_fast_the_one_with_fewer_complications_comes_first_and_the_text_says_so() -> None:
    def choice(seconds: float, layout: Layout, **parallelism: Any) -> Choice:
        parts = StepParts(arithmetic=seconds, exchange=0, sends=0, idle=0, reduction=0, update=0)
        return Choice(job().with_parallelism(**layout.sizes, **parallelism), parts, 0)

    layers = job().model.num_hidden_layers
    mixed = StageModes(full=1, none=layers // 2 - 1), StageModes(none=layers // 2)
    own_cut = choice(1.01, Layout(1, 2, 4), pipeline_layers_per_stage=(layers // 2 + 1, layers // 2 - 1))
    slower = choice(1.04, Layout(2, 2, 2), pipeline_layers_per_stage=(layers // 2 + 1, layers // 2 - 1))
    twice = choice(1.0, Layout(1, 2, 2, 2), recompute=mixed)
    ordered = simplest_first([twice, own_cut, slower], OWN)
    assert ordered[0] is slower, "the job's own sizes"
    ordered = simplest_first([twice, own_cut, slower], Layout(1, 1, 8))
    assert [*ordered] == [own_cut, twice, slower]
    _, why = reasons(module.SearchResult(ordered, None, 3), 80e9, machine(job()), Layout(1, 1, 8))
    less = "takes 1.0% less, too little for predictions to tell apart, but is less simple"
    assert why.endswith(f"{less} (several modes of recomputation, context parallelism)")


def test_gpus_that_gain_less_than_predictions_can_tell_stay_unused() -> None:
    training = {"steps": 10, "sequence_length": 256, "global_batch_size": 32, "micro_batch_size": 1,
                "precision": "bf16"}  # fmt: skip
    spec = job("60m", training=training)
    report = search_report(spec, PlanSearch(gpus=64, top=2))
    first, fastest = report.choices
    assert first.world_size < fastest.world_size < 64 and first.step_seconds <= (1 + NEAR_TIE) * fastest.step_seconds
    less = 1 - fastest.step_seconds / first.step_seconds
    assert (
        f"{first.world_size} of 64 GPUs are used: with {fastest.world_size} a step takes {less:.1%} less, too little "
        "for predictions to tell apart"
    ) in report.why


@pytest.mark.full
@pytest.mark.parametrize("seed", [7, 25, 48])  # without a cut of their own their plans take 5 to 13 % longer
def test_stages_are_cut_as_brute_force_has_them(seed: int) -> None:
    small = drawn(seed)
    ours = search(small.job, small.gpus, small.machine, small.device_bytes, 1).choices[0]
    assert ours.job.parallelism.pipeline_layers_per_stage is not None
    assert ours.seconds.total <= 1.01 * fastest(small, ours.seconds.total)
    content = small.job.model_dump(mode="json")
    content |= {name: changes and content[name] | changes for name, changes in ours.patch.items()}
    patched = JobSpec.model_validate(content)
    assert rank_memory(patched, ours.layout).total == ours.needed
    assert replayed_parts(patched, ours.layout, small.machine).total == pytest.approx(ours.seconds.total)
    again = search(patched, small.gpus, small.machine, small.device_bytes, 1).choices
    assert [choice.patch for choice in again] == [ours.patch], "the job's own cut does not matter"


def test_no_cut_takes_less_than_the_least_that_is_taken_of_all() -> None:
    for seed in range(40):
        small, random = drawn(seed), Random(seed)
        layers, size = small.job.model.num_hidden_layers, random.choice((2, 3, 4))
        schedule = random.choice(("1f1b", "interleaved_1f1b", "zero_bubble"))
        stages = size if schedule == "1f1b" else 2 * size
        if stages > layers or small.gpus < size or (small.job.model.family == "dense" and schedule == "zero_bubble"):
            continue
        layout = Layout(random.choice((1, 2)) if small.gpus >= 2 * size else 1, size, 1)
        ends = sorted(random.sample(range(1, layers), stages - 1))
        own = tuple(end - begin for begin, end in pairwise((0, *ends, layers)))
        jobs = []
        for cut in (None, own):
            changes = {**layout.sizes, "pipeline_schedule": schedule, "pipeline_layers_per_stage": cut}
            parallelism = small.job.parallelism.model_copy(update=changes)
            jobs.append(small.job.model_copy(update={"parallelism": parallelism}))
        on = random.choice((small.machine, replace(small.machine, fitted=_corrections(random, jobs[0]))))
        steps = [Step(each, layout, on) for each in jobs]
        played = [step.played() * (1 + 1e-9) for step in steps]
        one = jobs[0].with_parallelism(pipeline_parallel_size=1, pipeline_schedule="1f1b")
        whole, behind = Step(one, Layout(layout.tp, 1, 1), on).of_a_micro_batch()
        more = behind * (size - 1) if schedule == "1f1b" else 0.0
        assert (jobs[0].training.micro_batches(1) + more) * whole / size <= min(played)
        two = jobs[0].with_parallelism(pipeline_parallel_size=2, pipeline_schedule="1f1b")
        assert Step(two, Layout(layout.tp, 2, 1), on).keeping(jobs[0]).played() == steps[0].played()
        assert steps[0].at_least_however_cut() <= min(played)
        assert all(step.at_least() <= seconds for step, seconds in zip(steps, played, strict=True))


def _corrections(random: Random, job: JobSpec) -> Fitted:
    """Of a shape that has run and of all others, either of them the faster one in either way."""

    def some() -> dict[str, Any]:
        factor, other = random.choice((0.2, 1.0, 5.0)), random.choice((0.2, 1.0, 5.0))
        return {
            "jobs": 9,
            "factor": factor,
            "spread": 0.1,
            "communication": Correction(jobs=9, factor=other, spread=0.1),
        }

    shape = ShapeCorrection(**some(), shape=shape_of(job))
    return Fitted(**some(), kind="H100", precision="bf16", shapes=(shape,))


def test_batches_that_grow_split_over_the_replicas_that_are_found() -> None:
    content = job(batch=64).model_dump(mode="json")
    content["training"]["batch_size_warmup"] = [{"until_step": 5, "global_batch_size": 4}]
    spec = JobSpec.model_validate(content)
    (best,) = search(spec, 64, machine(spec), 80e9, 1).choices
    assert best.layout.dp * best.job.training.micro_batch_size <= 4


@pytest.mark.full
def test_long_sequences_are_dealt_to_several_ranks() -> None:
    training = {"steps": 10, "sequence_length": 524_288, "global_batch_size": 8, "micro_batch_size": 1,
                "precision": "bf16"}  # fmt: skip
    long = job("7b", batch=8, training=training, resources=A100)
    (best,) = search(long, 64, machine(long), 80e9, 1).choices
    assert best.layout.cp > 1
    again = JobSpec.model_validate(long.model_dump(mode="json") | {
        name: changes and long.model_dump(mode="json")[name] | changes for name, changes in best.patch.items()
    })  # fmt: skip
    assert list(again.layouts()) == [best.layout]
    assert rank_memory(again, replace(best.layout, cp=1)).total > 80e9
    found = search(long, 64, machine(long), 80e9, 200).choices
    assert any(choice.layout.cp > 1 and choice.layout.pp > 1 for choice in found)
    few, many = (Layout(4, 2, 8 // cp, cp) for cp in (2, 8))  # a quarter of the tokens, of four times the micro-batches
    jobs = {
        each: long.model_copy(update={"parallelism": long.parallelism.model_copy(update=each.sizes)})
        for each in (few, many)
    }
    assert rank_memory(jobs[many], many).activations < rank_memory(jobs[few], few).activations / 3
    sends = [step_parts(each, layout, machine(long)).sends for layout, each in jobs.items()]
    assert sends[1] == pytest.approx(sends[0], rel=0.01)
    short = job("7b", batch=8)
    assert {choice.layout.cp for choice in search(short, 64, machine(short), 80e9, 20).choices} == {1}


def test_the_patch_of_an_elastic_job_makes_the_choice() -> None:
    spec = job(elasticity={"data_parallel_size": {"min": 1, "max": 2}})
    (best,) = search(spec, 8, machine(spec), 80e9, 1).choices
    content = spec.model_dump(mode="json")
    content |= {name: changes and content[name] | changes for name, changes in best.patch.items()}
    assert list(JobSpec.model_validate(content).layouts()) == [best.layout]


def test_the_plan_of_a_pipeline_that_a_search_chose_says_the_seconds_of_the_search_too() -> None:
    spec = job("7b", 64, model={"family": "dense"}, resources={"gpus_per_worker": 1, "accelerator_type": "A10"})
    choices = search_report(spec, PlanSearch(gpus=16)).choices
    chosen = next(each for each in choices if each.patch["parallelism"]["pipeline_schedule"] == "interleaved_1f1b")
    content = spec.model_dump(mode="json")
    content |= {name: changes and content[name] | changes for name, changes in chosen.patch.items()}
    planned = plan(JobSpec.model_validate(content))
    assert planned.shapes[0].step_seconds > 1.01 * chosen.step_seconds
    (note,) = [note for note in planned.notes if "by a formula for pipelines" in note]
    assert note.endswith(f"{rounded(chosen.step_seconds)} s where its passes are simulated, as in searches")


def seconds_of(choices: list[Choice]) -> list[float]:
    return [choice.seconds.total for choice in choices]


@pytest.mark.nightly
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["3b", "7b"]), st.sampled_from([2, 6, 8, 16]), st.sampled_from([20e9, 40e9, 80e9, 141e9]),
    st.sampled_from([25, 300]), st.sampled_from([3, 50]), st.sampled_from([None, 80e9, 160e9]),
)  # fmt: skip
def test_what_is_found_fits_is_legal_and_never_gets_worse_when_something_is_added(
    preset: str, gpus: int, device: float, inside: float, outside: float, host: float | None
) -> None:
    spec = job(preset)
    on = machine(spec, 8, inside, outside, host)
    found = search(spec, gpus, on, device, 3)
    assert found == search(spec, gpus, on, device, 3)
    assert seconds_of(found.choices) == sorted(seconds_of(found.choices))
    for choice in found.choices:
        content = spec.model_dump(mode="json")
        for section, changes in choice.patch.items():
            content[section] = changes and content[section] | changes
        patched = JobSpec.model_validate(content)  # legal
        assert choice.layout.world_size <= gpus
        assert rank_memory(patched, choice.layout).total == choice.needed <= device * (1 - SPARE)
        assert host is None or choice.host <= host
        assert replayed_parts(patched, choice.layout, on).total == pytest.approx(choice.seconds.total)
    for better in (
        search(spec, gpus, on, device * 2, 1),
        search(spec, gpus, machine(spec, 8, inside * 2, outside, host), device, 1),
        search(spec, gpus, machine(spec, 8, inside, outside * 2, host), device, 1),
        search(spec, gpus, machine(spec, 8, inside, outside, host and 1.1 * host), device, 1),
        search(spec, gpus + 1, on, device, 1),
    ):
        if found.choices:
            assert better.choices[0].seconds.total <= found.choices[0].seconds.total * (1 + 1e-9)


def test_the_optimizers_state_goes_to_hosts_of_known_memory_where_a_device_is_too_small() -> None:
    spec = job("7b")
    assert not search(spec, 1, machine(spec), 40e9, 1).choices
    assert not search(spec, 1, machine(spec, host=100e9), 40e9, 1).choices
    (found,) = search(spec, 1, machine(spec, host=500e9), 40e9, 1).choices
    assert found.patch["parallelism"]["optimizer_offload"] == 1
    assert str(found).endswith(", optimizer state on the host")
    assert found.needed <= 40e9 * (1 - SPARE) and 0 < found.host <= 500e9
    assert search(spec, 8, machine(spec, host=2e12), 80e9, 1).choices[0].patch["parallelism"]["optimizer_offload"] == 0
    on_cpus = job("7b", resources={"gpus_per_worker": 0})
    assert not search(on_cpus, 1, machine(on_cpus, host=500e9), 40e9, 1).choices


@pytest.mark.full
def test_hosts_of_a_described_network_have_the_memory_that_it_says_and_jobs_on_cpus_need_none(tmp_path: Path) -> None:
    described, spec = network(8, 450, 50).model_copy(update={"node_memory_gigabytes": 100.0}), job("30b", 64)
    (tmp_path / "job.json").write_text(spec.model_dump_json())
    (tmp_path / "net.json").write_text(described.model_dump_json())
    command = ["plan", str(tmp_path / "job.json"), "--cluster", str(tmp_path / "net.json"), "--json"]
    plan = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert [(shape["node_memory_bytes"], shape["fits_host"]) for shape in plan["shapes"]] == [(10**11, False)]
    assert search_report(spec, PlanSearch(gpus=8, cluster=described, top=1)).node_memory_bytes == 10**11
    on_cpus = job("60m", resources={"gpus_per_worker": 0})
    assert search_report(on_cpus, PlanSearch(gpus=1, cluster=described, top=1)).node_memory_bytes is None


@pytest.mark.full
def test_low_rank_models_take_fewer_tensor_parallel_ranks_than_dense_ones() -> None:
    for outside in (100, 12.5):
        tensors = {}
        for family in ("cola", "dense"):
            spec = job("30b", 512, model={"family": family})
            best = search(spec, 128, machine(spec, 8, 450, outside), 80e9, 1).choices[0]
            tensors[family] = best.layout.tp * best.layout.pp
        assert tensors["cola"] < tensors["dense"]


@pytest.mark.full
def test_reasons_name_the_deciding_term_the_next_best_and_the_nearest_misfit() -> None:
    spec = job("30b", 64)
    on = machine(spec)
    found = search(spec, 16, on, 80e9)
    first, second, misfit = reasons(found, 80e9, on)
    assert first.startswith("most of its step is arithmetic (")
    assert str(found.choices[1]) in second
    assert "% longer: " in second
    best = found.choices[0]
    slower = best._replace(seconds=best.seconds.model_copy(update={"arithmetic": 1.0001 * best.seconds.arithmetic}))
    assert longer(slower, best) == longer(best, slower) == "as long"
    assert found.misfit is not None
    assert found.misfit.needed > 80e9 * (1 - SPARE)
    assert found.misfit.seconds.total < found.choices[0].seconds.total
    assert f"lacks {(found.misfit.needed - 76.8e9) / 2**30:.1f} GiB of 74.5 GiB per GPU" in misfit
    on = replace(on, node_memory_bytes=int(280e9))
    short = search(spec, 16, on, 80e9)
    assert not short.choices
    assert short.misfit is not None
    assert short.misfit.host > 280e9
    (misfit,) = reasons(short, 80e9, on)
    assert "lacks " in misfit
    assert "of host memory: a node has 260.8 GiB for workers" in misfit
    nothing = search(spec, 1, on, 10e9)
    assert not nothing.choices
    assert nothing.misfit is not None


@pytest.mark.full
def test_all_tensor_parallel_groups_of_a_choice_have_a_node() -> None:
    levels = [
        {"name": "node", "fan_out": 4, "gigabytes_per_second": 32},
        {"name": "fabric", "fan_out": 3, "gigabytes_per_second": 12.5},
    ]
    model = {"family": "dense", "hidden_size": 3072, "num_attention_heads": 24, "intermediate_size": 9216}
    training = {
        "steps": 10, "sequence_length": 3072, "global_batch_size": 64, "micro_batch_size": 1, "precision": "bf16",
    }  # fmt: skip
    spec = job(
        model=model | {"num_hidden_layers": 30, "vocab_size": 49152}, training=training,
        resources={"gpus_per_worker": 1, "accelerator_type": "A10"},
    )  # fmt: skip
    cluster = NetworkConfig.model_validate({"levels": levels})
    report = search_report(spec, PlanSearch(gpus=12, cluster=cluster, top=20))
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    found = [Layout(*(choice.patch["parallelism"].get(name, 1) for name in names)) for choice in report.choices]
    assert {layout.tp for layout in found} >= {1, 2}
    assert all(fits(layout, [4] * 3) for layout in found), found


@pytest.mark.full
def test_what_would_change_the_choice_would(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job()
    on = machine(spec)
    first, less, more = (search_as_reported(spec, 8, on, memory).choices[0] for memory in (40e9, 32e9, 48e9))
    assert str(first) != str(search(spec, 8, on, 40e9, 1).choices[0]), "the first is not the fastest"
    scaled = module._scaled
    monkeypatch.setattr(module, "_scaled", lambda *of: [each for each in scaled(*of) if each[0] == "the memory's size"])
    told = list(sensitivities(spec, 8, on, 40e9, first))
    changes = {"-20%": less, "+20%": more}
    assert told == [f"with the memory's size {by}: {to}" for by, to in changes.items() if str(to) != str(first)] != []


@pytest.mark.full
def test_other_orders_of_ranks_are_told_where_they_would_gain() -> None:
    spec = job("30b", 4096)
    slow = [("box", 8, 25), ("rack", 4, 12.5), ("core", 1024, 3)]
    levels = [{"name": name, "fan_out": size, "gigabytes_per_second": rate} for name, size, rate in slow]
    on = machine_of(spec, cluster=NetworkConfig.model_validate({"levels": levels}).cluster())
    order = ("tp", "cp", "dp", "pp")
    ours, other = (search_as_reported(spec, 1024, on, 80e9, 1, each).choices[0] for each in (ORDER, order))
    (line,) = other_orders(spec, 1024, on, 80e9, ours)
    assert line.startswith(f"with ranks in the order tp, cp, dp, pp, which gangs do not support: {other}")
    assert line.endswith(f", {1 - other.seconds.total / ours.seconds.total:.1%} less")
    assert other.seconds.total < ours.seconds.total
    near = search_as_reported(spec, 8, machine(spec), 80e9).choices[0]
    assert not list(other_orders(spec, 8, machine(spec), 80e9, near))


@pytest.mark.full
@pytest.mark.parametrize(("preset", "device", "host"), [("30b", 80e9, None), ("40b", 40e9, None), ("40b", 40e9, 2e12)])
def test_a_thousand_gpus_are_searched_in_a_bounded_number_of_steps(
    preset: str, device: float, host: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return original(*arguments)

        return call

    monkeypatch.setattr(module, "rank_memory", counted("memory", rank_memory))
    for name in ("__init__", "played"):
        monkeypatch.setattr(Step, name, counted(name, getattr(Step, name)))
    monkeypatch.setattr(PipelineRank, "memory", counted("rank", PipelineRank.memory))
    spec = job(preset, 4096)
    found = search(spec, 1024, machine(spec, host=host), device)
    assert len(found.choices) == 5
    assert found.timed < 280
    assert calls["rank"] < (8_000 if host is None else 16_000)  # some 30 µs each
    assert calls["__init__"] < 1200  # mixes of modes take one of each mode
    assert calls["memory"] < 300
    assert calls["played"] < (
        100 if host is None else 200
    )  # most of them with other cuts; mixes with hosts and without


@pytest.mark.full
def test_a_report_travels_as_json_and_memory_that_is_not_known_limits_nothing() -> None:
    spec = job()
    report = search_report(spec, PlanSearch(gpus=8, top=2))
    assert type(report).model_validate_json(report.model_dump_json()) == report
    assert report.device_memory_bytes == 80e9
    unknown = job(resources={"gpus_per_worker": 1})
    unnamed = search_report(unknown, PlanSearch(gpus=8, top=2))
    assert unnamed.device_memory_bytes is unnamed.choices[0].kilowatt_hours is None
    assert any(why.startswith("device: ") and "NVIDIA A100 SXM 80 GB data sheet" in why for why in unnamed.why)
    assert any("so nothing is said of what fits" in why and "energy" in why for why in unnamed.why)
    assert not any("nothing is said" in why for why in report.why)
    assert search(spec, 8, machine(spec), inf, 1).choices


@pytest.mark.full
def test_a_search_says_what_is_published_for_the_preset_and_the_jobs_sizes(tmp_path: Path) -> None:
    spec = job("7b", model={"family": "cola"})
    report = search_report(spec, PlanSearch(gpus=8, top=1))
    planned = plan(spec)
    assert report.published == planned.published is not None
    assert (report.parameters, report.tokens_per_step) == (planned.parameters, planned.tokens_per_step)
    assert report.steps == spec.training.steps
    assert [why for why in report.why if "published" in why] == [note for note in planned.notes if "published" in note]
    file = tmp_path / "job.yaml"
    file.write_text(spec.model_dump_json())
    shown = CliRunner().invoke(app, ["plan", str(file), "--gpus", "8"], env={"COLUMNS": "200"})
    assert "tokens per step  131,072, 1.31 million in all 10 steps" in shown.stdout
    assert "published for CoLA 7B (arXiv 2502.10940): learning rate 0.001 at 131,072 tokens per step" in shown.stdout
    hosts = [each.node_host_bytes for each in search_report(spec, PlanSearch(gpus=8)).choices]
    assert max(hosts) > hosts[0]
    assert f"hosts: up to {size_in_words(hosts[0])} per node" in shown.stdout


@pytest.mark.full
def test_a_long_choice_says_why_it_has_its_context_parallel_size() -> None:
    training = {"steps": 10, "sequence_length": 131072, "global_batch_size": 16, "micro_batch_size": 1,
                "precision": "bf16"}  # fmt: skip
    spec = job("7b", training=training, resources=A100)
    report = search_report(spec, PlanSearch(gpus=16, top=1))
    (choice,), context = report.choices, report.context
    assert context is not None
    own, *others = context.sizes
    assert own.context_parallel_size == choice.patch["parallelism"]["context_parallel_size"] > 1
    assert own.memory_bytes == choice.memory_bytes
    assert own.step_seconds == pytest.approx(choice.step_seconds, rel=1e-12)  # summed in another order
    for other in others:
        better = other.step_seconds * (1 + NEAR_TIE) < own.step_seconds and other.world_size <= 16
        assert not better or other.memory_bytes > 80e9 * (1 - SPARE)
        assert f"cp {other.context_parallel_size} with dp " in context.why[0]
    assert search_report(job(), PlanSearch(gpus=8, top=1)).context is None


@pytest.mark.full
def test_a_search_in_another_process_finds_the_same_and_ends_in_time() -> None:
    spec, asked = job(), PlanSearch(gpus=8, top=2, cluster=network(4, 300, 25))
    assert search_apart(spec, asked, 60) == search_report(spec, asked)
    with pytest.raises(TooLong, match=r"longer than 0\.01 s; search for fewer GPUs or without explain"):
        search_apart(spec, asked, 0.01)


@pytest.mark.full
def test_a_search_that_fails_says_why_in_a_sentence() -> None:
    profile = {
        "device": "H100", "commit": "a", "torch_version": "2", "triton_version": "3", "precision": "fp32", "cores": 1,
        "cases": [], "product_flops": 1e14, "attention_flops": 1e14, "bandwidth": 1e12, "start_seconds": 0,
        "block_seconds": 0, "correction": 1, "spread": 0.1,
    }  # fmt: skip
    of_another_precision = PlanSearch.model_validate({"gpus": 8, "profile": profile})
    with pytest.raises(SearchFailed, match=r"the search for ways to train this job failed: .*the profile is of fp32"):
        search_apart(job(), of_another_precision, 60)


@pytest.mark.full
@pytest.mark.parametrize("wrong", [{"spread": 1000}, {"bandwidth": inf}, {"product_flops": nan}, {"correction": 0}])
def test_profiles_beyond_anything_measured_are_refused(wrong: dict[str, float]) -> None:
    profile = {"device": "x", "commit": "a", "torch_version": "2", "triton_version": "3", "precision": "bf16",
               "cores": 1, "cases": [], "product_flops": 1e20, "attention_flops": 1, "bandwidth": 1e12,
               "start_seconds": 1e3, "block_seconds": 0, "correction": 1, "spread": 10}  # fmt: skip
    spec = job()
    assert search_report(spec, PlanSearch.model_validate({"gpus": 8, "profile": profile})).choices
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        PlanSearch.model_validate({"gpus": 8, "profile": profile | wrong})


@pytest.mark.full
def test_the_command_line_searches_a_described_network_or_says_what_is_wrong(tmp_path: Path) -> None:
    file, levels = tmp_path / "job.yaml", tmp_path / "net.yaml"
    file.write_text(job().model_dump_json())

    def run(content: dict[str, Any], *more: str) -> Any:
        levels.write_text(json.dumps(content))
        return CliRunner().invoke(app, ["plan", str(file), "--gpus", "8", "--cluster", str(levels), *more])

    good = network(4, 300, 25).model_dump(mode="json")
    assert "the next best" in run(good).output
    found = json.loads(run(good, "--json", "--top", "2", "--explain").stdout)
    assert len(found["choices"]) == 2
    assert found["choices"][0]["patch"]["parallelism"]["data_parallel_size"] >= 1
    slow = [good["levels"][0] | {"gigabytes_per_second": 0}]
    refused = run({"levels": slow})
    assert refused.exit_code == 2
    assert "gigabytes_per_second" in refused.output and "at least 1 entry" not in refused.output
    with pytest.raises(ValidationError) as wrong:
        NetworkConfig.model_validate({"levels": slow})
    assert in_lines(wrong.value) == "levels.0.gigabytes_per_second: should be greater than 0"
    assert "at least 1 entry, not 0" in run({"levels": []}).output


def test_layouts_are_not_chosen_for_one_network_and_planned_on_another(tmp_path: Path) -> None:
    file, levels = tmp_path / "job.yaml", tmp_path / "net.yaml"
    left = job().model_dump(mode="json") | {"elasticity": {"layouts": "auto", "gpus": {"min": 8, "max": 16}}}
    file.write_text(json.dumps(left | {"parallelism": {}}))
    levels.write_text(network(4, 300, 25).model_dump_json())
    for option in (("--network", "10"), ("--cluster", str(levels))):
        refused = CliRunner().invoke(app, ["plan", str(file), *option], env={"COLUMNS": "200"})
        assert refused.exit_code == 2, refused.output
        assert "layouts: auto takes no --cluster or --network" in refused.output
    for searching in (("--explain",), ("--top", "3"), ("--gpus", "H100", "--top", "5")):
        refused = CliRunner().invoke(app, ["plan", str(file), *searching], env={"COLUMNS": "200"})
        assert refused.exit_code == 2, refused.output
        assert "--explain and --top are for searches: give --gpus a number" in refused.output


@pytest.mark.full
def test_the_kind_of_gpu_is_an_option_of_the_plan(tmp_path: Path) -> None:
    file, levels = tmp_path / "job.yaml", tmp_path / "net.yaml"
    file.write_text(job("tiny", resources={"gpus_per_worker": 0}).model_dump_json())
    content = network(4, 300, 25).model_dump(mode="json")
    device = {"name": "mine", "memory_gigabytes": 48, "teraflops": 200, "terabytes_per_second": 1}
    levels.write_text(json.dumps(content | {"device": device}))

    def run(gpus: str, *more: str) -> Any:
        return CliRunner().invoke(app, ["plan", str(file), "--gpus", gpus, *more], env={"COLUMNS": "400"})

    for spelled in ("8xh100", "8 x H100", "8X H100"):
        assert json.loads(run(spelled, "--json").stdout)["device_memory_bytes"] == 80e9
    assert "- the job asks for no GPUs: these are 8 CPU ranks; set resources.gpus_per_worker: 1" in run("8").output
    assert json.loads(run("4xRTX-4090", "--json").stdout)["device_memory_bytes"] == 24e9
    own = json.loads(run("A100-40G", "--json").stdout)
    assert [shape["device_memory_bytes"] for shape in own["shapes"]] == [40e9]
    for gpus, said in (
        ("8xP40", "GPUs named 'P40' (the nearest: L40, A40, L40S); name one of A10, "),
        ("8xMI300X", "GPUs named 'MI300X'; name one of A10, "),
        ("-8", "--gpus -8: give a number from 1 to 65536"),
        ("P40", "GPUs named 'P40' (the nearest"),
        ("0xH100", "--gpus 0xH100: give a number from 1 to 65536, a kind of GPU, or both, such as 64xH100"),
        ("64H100", "--gpus 64H100: give a number"),
        ("", "--gpus : give a number"),
        (" ", "give a number"),
    ):
        refused = run(gpus)
        assert refused.exit_code == 2 and said in refused.output
    assert "--cluster describes the GPUs already; leave out H100" in run("8xH100", "--cluster", str(levels)).output


@pytest.mark.full
def test_a_meshed_node_is_slower_among_two() -> None:
    spec = job("7b", parallelism={"tensor_parallel_size": 2})
    switched = machine(spec)
    level = replace(switched.cluster.levels[0], meshed=True)
    meshed = replace(switched, cluster=replace(switched.cluster, levels=(level, *switched.cluster.levels[1:])))
    assert step_seconds(spec, Layout(2, 1, 1), meshed) > step_seconds(spec, Layout(2, 1, 1), switched)
