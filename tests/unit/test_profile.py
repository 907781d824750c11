"""Profiles: from times to rates, and from rates to plans. How long anything takes here is made up."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from boost_core.architecture import block_parameters
from boost_core.bench import profile as bench
from boost_core.bench.comm import faster_up_to, hidden_share
from boost_core.bench.rank import RunShape, Variant
from boost_core.config import JobSpec, Layout
from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.plan.machine import (
    Machine,
    MeasuredLink,
    MeasuredProfile,
    NetworkConfig,
    Profile,
    Work,
    machine_for,
    machine_of,
)
from boost_core.plan.report import plan, step_parts
from boost_core.plan.throughput import Step, block_work
from service.cli.main import app
from tests.jobs import tiny_job

FLOPS, BANDWIDTH, START, LAUNCHING = 3e10, 4e9, 2e-5, 5e-3
CPU = torch.device("cpu")
EXACT = Profile(FLOPS, FLOPS, BANDWIDTH, START, 0.0, 0.0, 0.0, True, "a test's")
MEASURED = MeasuredProfile(
    device="a test's", commit="0123456789abcdef", torch_version="2", triton_version="", precision="fp32", cores=1,
    cases=("made up",), product_flops=1e11, attention_flops=5e10, bandwidth=1e10, start_seconds=1e-5,
    block_seconds=1e-4, correction=1.25, spread=0.1,
)  # fmt: skip


def made_up_seconds(call: Callable[[], object], *_: Any) -> list[float]:
    """What a product or a copy would take."""
    assert isinstance(call, partial)
    operands = call.args if len(call.args) > 1 else (call.func.__self__, *call.args)  # type: ignore[attr-defined]
    if len(operands[0].shape) < 3:
        return [2 * operands[0].numel() / BANDWIDTH + START]
    (batch, rows, inner), (_, _, outer) = operands[0].shape, operands[1].shape
    moved = 4 * batch * (rows * inner + inner * outer + rows * outer)
    return [2 * batch * rows * inner * outer / FLOPS + moved / BANDWIDTH + START]


def test_what_is_measured_are_the_rates_that_times_were_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up_block(shape: RunShape, variant: Variant, *_: Any) -> float:
        """Half as long again as its work, its launches in turn and its update; of a few tokens, just these."""
        job = variant.job(shape, CPU)
        weights = block_parameters(job.model, crossed=False) / 2
        computing = EXACT.seconds(block_work(job, job.parallelism.recompute).all)
        return (1 if shape.sequence_length == 16 else 1.5) * (computing + LAUNCHING + EXACT.update_seconds(weights, 4))

    monkeypatch.setattr(bench, "_attention_rate", lambda *_: FLOPS)
    monkeypatch.setattr(bench, "kernel_seconds", made_up_seconds)
    monkeypatch.setattr(bench, "block_seconds", made_up_block)
    measured = bench.measure(RunShape("tiny", 2, 2, 64), CPU, 1)
    assert measured.product_flops == pytest.approx(FLOPS, rel=0.02)
    assert measured.bandwidth == pytest.approx(BANDWIDTH, rel=0.02)
    assert measured.start_seconds == pytest.approx(START, rel=0.02)
    assert measured.block_seconds == pytest.approx(LAUNCHING, rel=0.02)
    assert measured.correction == pytest.approx(1.5, rel=0.01)
    assert measured.spread < 0.01
    assert len(measured.cases) == 5


def test_a_fit_takes_the_middle_of_what_disagrees() -> None:
    work = [Work(10.0**power, 0.0, 10.0 ** (power - 1 + power % 2), 1) for power in range(5, 12)]
    samples = [
        (each, EXACT.seconds(each) * factor)
        for each, factor in zip(work, (1.03, 0.97, 1.02, 0.98, 1.03, 0.97, 1.0), strict=True)
    ]
    for found, made_of in zip(bench.fit(samples), (FLOPS, BANDWIDTH, START), strict=True):
        assert found == pytest.approx(made_of, rel=0.15)


def test_times_that_follow_from_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="something else running"):
        bench.fit([(Work(flops, 0.0, 1e6, 1), 1e8 / flops) for flops in (1e9, 1e10, 1e11)])


def test_a_plan_goes_by_what_was_measured_and_says_so() -> None:
    spec = tiny_job("corpus", "checkpoints")
    assumed, measured = plan(spec), plan(spec, machine_of(spec, MEASURED))
    assert (assumed.provenance, measured.provenance) == ("assumed", "measured")
    (shape,) = measured.shapes
    low, high = shape.step_seconds_range
    assert math.sqrt(low * high) == pytest.approx(shape.step_seconds)
    assert high / low == pytest.approx(math.exp(2 * 1.2816 * 0.1))
    assert any("measured at 0123456789ab" in note for note in measured.notes)
    twice = MEASURED.model_copy(update={"correction": 2.5, "block_seconds": 0.0})
    once = MEASURED.model_copy(update={"block_seconds": 0.0})
    slow, fast = (step_parts(spec, Layout(1, 1, 1), one.machine(MACHINE, "fp32")) for one in (twice, once))
    assert slow.arithmetic == pytest.approx(2 * fast.arithmetic)


@pytest.mark.parametrize(
    ("kind", "changes", "share"),
    [
        ("H100", {}, 0.47),
        ("H100", {"training": {"sequence_length": 32_768}}, 0.53),
        ("H100", {"training": {"sequence_length": 1024}}, 0.30),  # no figure is known
        ("H100", {"model": {"num_attention_heads": 64}}, 0.30),
        ("H100", {"data": {"documents_apart": True}}, 0.30),  # flash attention's
        ("H100", {"parallelism": {"context_parallel_size": 2}}, 0.30),
        ("A100", {}, 0.45),
    ],
)
def test_attention_is_as_fast_as_the_kernel_that_computes_it(
    kind: str, changes: dict[str, Any], share: float
) -> None:  # fmt: skip
    spec = {
        "name": "attends", "model": {"preset": "7b", "vocab_size": 32_000}, "training": {
            "steps": 1, "sequence_length": 4096, "global_batch_size": 1, "micro_batch_size": 1, "precision": "bf16",
        },
        "data": {}, "parallelism": {}, "resources": {"gpus_per_worker": 1, "accelerator_type": kind},
    }  # fmt: skip
    job = JobSpec.model_validate({name: section | changes.get(name, {}) if isinstance(section, dict) else section
                                  for name, section in spec.items()})  # fmt: skip
    profile = Step(job, Layout.of(job.parallelism), machine_of(job))._profile
    assert profile.attention_flops == pytest.approx(share * {"H100": 989e12, "A100": 312e12}[kind])


MACHINE = machine_for(tiny_job("corpus", "checkpoints").resources, "fp32")


def test_measured_links_are_those_of_their_levels() -> None:
    spec = tiny_job("corpus", "checkpoints", resources={"gpus_per_worker": 1, "accelerator_type": "H100"})
    link = MeasuredLink(ranks=2, base_seconds=1e-4, bytes_per_second=5e9, overlap=0.5)
    between = link.model_copy(update={"bytes_per_second": 2e9, "ranks": 4})
    nominal, both = machine_of(spec), MEASURED.model_copy(update={"link": link, "between_nodes": between})

    def rates(machine: Machine) -> list[float]:
        return [level.link.bytes_per_second for level in machine.cluster.levels]

    assert machine_of(spec, MEASURED).cluster == nominal.cluster
    measured = machine_of(spec, both)
    assert (measured.profile.overlap, rates(measured)) == (0.5, [5e9, 2e9])
    assert [level.fan_out for level in measured.cluster.levels] == [level.fan_out for level in nominal.cluster.levels]
    racks = tiny_job("corpus", "checkpoints", resources={"gpus_per_worker": 1, "accelerator_type": "GB200"})
    assert rates(machine_of(racks, both)) == [5e9, rates(machine_of(racks))[1], 2e9]  # NVLink goes on in a rack
    inner_only = machine_of(spec, both.model_copy(update={"between_nodes": None}))
    assert rates(inner_only) == [5e9, rates(nominal)[1]]
    assert rates(MEASURED.model_copy(update={"link": link, "between_nodes": between}).machine(MACHINE, "fp32")) == [5e9]


def test_a_described_network_keeps_its_links_beyond_nodes() -> None:
    spec = tiny_job("corpus", "checkpoints", resources={"gpus_per_worker": 1, "accelerator_type": "H100"})
    link = MeasuredLink(ranks=2, base_seconds=1e-4, bytes_per_second=5e9, overlap=0.5)
    levels = [{"name": name, "fan_out": 4, "gigabytes_per_second": 9} for name in ("node", "rack", "spine")]
    profile = MEASURED.model_copy(update={"link": link, "between_nodes": link})
    described = machine_of(spec, profile, NetworkConfig.model_validate({"levels": levels}).cluster())
    assert [level.link.bytes_per_second for level in described.cluster.levels] == [5e9, 9e9, 9e9]


def test_the_hosts_bandwidth_is_as_measured_or_the_data_sheets() -> None:
    nominal = MEASURED.machine(MACHINE, "fp32").profile.host_bandwidth
    assert nominal == MACHINE.profile.host_bandwidth
    assert MEASURED.model_copy(update={"host_bandwidth": 5e10}).machine(MACHINE, "fp32").profile.host_bandwidth == 5e10


def test_what_other_work_hides_is_not_counted_twice() -> None:
    assert [hidden_share(2.0, 3.0, both) for both in (5.0, 4.0, 3.0, 2.0, 6.0)] == [0, 0.5, 1, 1, 0]
    spec = tiny_job("corpus", "checkpoints", parallelism={"tensor_parallel_size": 2})
    open_, hidden = (
        step_parts(spec, Layout(2, 1, 1), replace(MACHINE, profile=replace(MACHINE.profile, overlap=overlap)))
        for overlap in (0.0, 1.0)
    )
    assert hidden.exchange < open_.exchange
    assert hidden.arithmetic == open_.arithmetic


def test_the_command_line_reads_a_profile_or_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    job, profile = tmp_path / "job.yaml", tmp_path / "profile.json"
    job.write_text(json.dumps({"name": "x", "model": {"preset": "tiny"}, "training": {"steps": 1}}))

    def run(content: str) -> Any:
        profile.write_text(content)
        return CliRunner().invoke(app, ["plan", str(job), "--profile", str(profile)])

    good = run(MEASURED.model_dump_json())
    assert good.exit_code == 0
    assert "measured at 0123456789ab" in good.output
    other = run(MEASURED.model_copy(update={"precision": "bf16"}).model_dump_json())
    assert (other.exit_code, "the profile is of bf16" in other.output) == (2, True)
    assert run(MEASURED.model_copy(update={"bandwidth": -1.0}).model_dump_json()).exit_code == 2
    assert run("{").exit_code == 2


@pytest.mark.parametrize(
    ("one_shot", "two_shots", "found"),
    [
        ([1, 1, 9, 9], [2, 2, 2, 9], (20, 30)),
        ([1, 1, 1, 1], [2, 2, 2, 2], (40, 0)),
        ([9, 9, 9, 9], [1, 1, 9, 1], (0, 20)),  # a size that is faster again counts for nothing
        ([1, 9, 9, 9], [9, 9, 9, 9], (10, 0)),
        ([9, 1, 1, 1], [9, 1, 1, 1], None),
    ],
)
def test_symmetric_memory_is_for_the_sizes_up_to_which_it_was_faster(
    one_shot: list[float], two_shots: list[float], found: tuple[int, int] | None
) -> None:
    limits = found and SymmetricMemoryConfig(one_shot_bytes=found[0], two_shot_bytes=found[1])
    assert faster_up_to([10, 20, 30, 40], [3, 3, 3, 3], one_shot, two_shots) == limits


@pytest.mark.parametrize(("in_turn", "seconds"), [(False, (2.0, 3.0, 2.0)), (True, (3.0, 5.0, 2.0))])
def test_a_gpu_launches_kernels_while_it_computes_and_a_cpu_in_turn(
    in_turn: bool, seconds: tuple[float, float, float]
) -> None:
    """Of what computes for two seconds, with launches of less and of more; and of a graph."""
    work, profile = Work(moved_bytes=2 * BANDWIDTH), replace(EXACT, launches_in_turn=in_turn)
    slow, slower = (replace(profile, block_seconds=launching) for launching in (1.0, 3.0))
    found = slow.of_a_block(work), slower.of_a_block(work), slower.of_a_block(work, captured=True)
    assert found == pytest.approx(seconds)
