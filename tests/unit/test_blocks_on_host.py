"""Where the host's memory is known, plans keep blocks there: examples with their figures, the same everywhere."""

from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from typing import Any

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, ComparisonReport
from boost_core.plan.machine import SPARE, Basis, MeasuredProfile, shape_of
from boost_core.plan.memory import Memory, node_bytes, rank_memory
from boost_core.plan.report import at, needed_bytes, nothing_fits, plan, step_seconds
from boost_core.plan.resolve import NothingFits, choose_layouts
from boost_core.plan.search import largest_part, reasons, search, search_as_reported, sensitivities
from service.gang.assignment import bytes_to_keep
from service.gang.control import port
from service.gang.status import Orders
from service.jobs.model import JobRecord
from service.jobs.observations import observation
from service.scheduler.demand import demand_of
from tests.planning_truth import offload_seconds
from tests.scheduling import job as record_of
from tests.unit.fake_gang import START_SECONDS, FakeGang

HOSTS = Basis(node_memory_bytes=10**12)
TOKENS = 16_384
BLOCKS = 32


def job(tensor: int, sequences: int, kind: str = "A100-40G", recompute: str = "auto", **changes: Any) -> JobSpec:
    """7B by CoLA in micro-batches of some sequences of 16,384 tokens."""
    spec = {
        "name": "long",
        "model": {"preset": "7b", "vocab_size": 32_000, "family": "cola"},
        "parallelism": {"tensor_parallel_size": tensor, "recompute": recompute},
        "training": {
            "steps": 10, "sequence_length": TOKENS, "global_batch_size": 16, "micro_batch_size": sequences,
            "precision": "bf16",
        },
        "resources": {"gpus_per_worker": 1, "accelerator_type": kind},
    }  # fmt: skip
    return JobSpec.model_validate(spec | changes)


def test_a_block_of_7b_on_four_gpus_is_hidden_by_its_forward_pass_in_slices_but_not_whole() -> None:
    """Per token and block (7r/p + 2d/p) elements: 126 MB, 4.9 ms at 25.6 GB/s. Latents whole are 302 MB, 11.8 ms."""
    training = {"steps": 1, "sequence_length": 4096, "global_batch_size": 4, "micro_batch_size": 4, "precision": "bf16"}
    spec, layout = job(4, 4, "A100", "offload", training=training), Layout(4, 1, 1)
    on = Basis().machine(spec)
    slices = (7 * 1024 // 4 + 2 * 4096 // 4) * 2  # r = d/4 = 1024
    statistics = 6  # bytes: of the first input, and sent with latents
    assert rank_memory(spec, layout).host == BLOCKS * TOKENS * (slices + statistics) == BLOCKS * 125_927_424
    assert on.profile.host_bandwidth == 25.6e9
    copy, whole = 125_927_424 / 25.6e9, TOKENS * 18_438 / 25.6e9
    assert copy == pytest.approx(4.92e-3, rel=1e-3)
    assert whole == pytest.approx(11.8e-3, rel=1e-3)
    assert offload_seconds(spec, layout, on) == 0
    # A bus that takes as long for the slices as this one for whole latents: forward passes hide part of that.
    slower = replace(on, profile=replace(on.profile, host_bandwidth=125_927_424 / whole))
    forward = whole - offload_seconds(spec, layout, slower) / BLOCKS
    assert copy < forward < whole
    assert forward == pytest.approx(5.32e-3, rel=0.01)  # of the published step's 7.5 ms, exchanges are the rest


def test_the_host_spares_recomputation() -> None:
    spec, layout = job(2, 2), Layout(2, 1, 1)
    without, found = (at(spec, layout, basis.machine(spec)) for basis in (Basis(), HOSTS))
    assert without.parallelism.recompute_text == "full 28 + shared 3 + latent 1"
    assert found.parallelism.recompute_text == "offload 26 + latent 3 + none 3"
    on = HOSTS.machine(spec)
    slow, fast = (step_seconds(each, layout, on) for each in (without, found))
    assert slow / fast == pytest.approx(1.085, abs=0.001)
    assert offload_seconds(found, layout, on) == 0  # all of it behind passes
    memory = rank_memory(found, layout)
    assert memory.total <= 40e9 * (1 - SPARE)
    # 26 blocks' slices of two sequences' tokens, for each of two ranks, and their copies of the state.
    kept = 26 * 2 * TOKENS * ((7 * 1024 // 2 + 2 * 4096 // 2) * 2 + 6)
    assert memory.host == kept
    assert node_bytes(memory, layout, on) == 2 * (kept + memory.copies) < 10**12


def test_a_job_that_fits_no_gpu_otherwise_trains() -> None:
    spec, layout = job(4, 8), Layout(4, 1, 1)
    refused = nothing_fits(spec, Basis().machine(spec))
    assert refused is not None
    assert "39.5 GiB of 37.3 GiB" in refused
    assert nothing_fits(spec, HOSTS.machine(spec)) is None
    assert at(spec, layout, HOSTS.machine(spec)).parallelism.recompute_text == "offload 28 + latent 2 + none 2"
    copies = rank_memory(job(4, 8, recompute="full"), layout).copies
    little = Basis(node_memory_bytes=4 * copies + 10**9).machine(spec)  # less than a block of each rank
    assert nothing_fits(spec, little) is not None
    assert rank_memory(at(spec, layout, little), layout).host == 0


def test_blocks_are_given_their_gpus_share_of_a_host_beside_recovery_copies() -> None:
    def away(gigabytes: int, **changes: Any) -> int:
        spec, basis = job(2, 2, **changes), Basis(node_memory_bytes=gigabytes * 10**9)
        layout = Layout.of(spec.parallelism)
        return at(spec, layout, basis.machine(spec)).parallelism.modes_of_all(BLOCKS).get("offload", 0)

    assert 0 < away(600) < away(640) < 26  # of 539 GB the copies of eight ranks like these two
    assert away(640, fault_tolerance={"memory_copy_every_steps": None}) == 26
    replicas = {"parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 4, "recompute": "auto"}}
    assert away(160, **replicas) < away(300, **replicas)  # ZeRO leaves each a quarter of the copies


def test_a_measured_bus_decides() -> None:
    spec, layout = job(2, 2), Layout(2, 1, 1)
    found = {}
    for bandwidth in (25e9, 2e9):
        measured = MeasuredProfile(
            device="an A100", commit="0", torch_version="2", triton_version="3", precision="bf16", cores=1, cases=(),
            product_flops=2.3e14, attention_flops=1.5e14, bandwidth=1.4e12, start_seconds=1e-6, block_seconds=1e-4,
            correction=1.0, spread=0.1, host_bandwidth=bandwidth,
        )  # fmt: skip
        basis = Basis(profile=measured, node_memory_bytes=10**12)
        (shape,) = plan(spec, basis.machine(spec)).shapes
        assert demand_of(spec, basis).seconds(layout) == shape.step_seconds
        found[bandwidth] = shape.recompute
    assert found[25e9].startswith("offload 26 + ")
    assert found[2e9].startswith("full 28 + ")


def test_all_parts_of_the_service_have_the_same_modes() -> None:
    spec, layout = job(2, 2), Layout(2, 1, 1)
    on = HOSTS.machine(spec)
    expected = at(spec, layout, on)
    (planned,) = plan(spec, on).shapes
    assert planned.recompute == expected.parallelism.recompute_text
    assert planned.fits_host
    demand = demand_of(spec, HOSTS)
    assert demand.layouts == (layout,)
    assert demand.seconds(layout) == planned.step_seconds == step_seconds(spec, layout, on)
    assert needed_bytes(spec, layout, on) == planned.memory.total == rank_memory(expected, layout).total
    gang = FakeGang(spec, Orders(layout, (layout,), Cause.LIMITS_CHANGED), "ab", HOSTS)
    gang.wait(START_SECONDS)
    assert [start.spec.parallelism for start in gang.of(port.StartReplica)] == [expected.parallelism]
    report = ComparisonReport(
        **layout.sizes, step=10, planned_bytes=[1, 1], peak_bytes=[1, 1], predicted_step_seconds=1.0,
        predicted_step_seconds_range=(0.8, 1.3), provenance="assumed", correction=1.0, step_seconds=1.0,
        predicted_exposed_communication_seconds=0.1, communication_correction=1.0, communication_share=0.1,
        exposed_communication_seconds=0.1,
    )  # fmt: skip
    of: JobRecord = record_of("a", 2).model_copy(update={"spec": spec, "node_memory_bytes": 10**12})
    observed = observation(of, report, datetime.now(UTC))
    assert observed is not None
    assert observed["shape"] == shape_of(expected)


def test_chosen_layouts_use_hosts_and_are_no_slower_for_it() -> None:
    def left(**changes: Any) -> JobSpec:
        return job(
            1, 2, parallelism={"recompute": "auto"}, elasticity={"layouts": "auto", "gpus": {"min": 1, "max": 8}},
            **changes,
        )  # fmt: skip

    spec = left()
    without, found = (choose_layouts(spec, basis) for basis in (Basis(), HOSTS))
    assert all(layout.node_host_bytes <= 10**12 for layout in found.layouts)
    assert demand_of(spec.with_layouts(found.sizes), HOSTS).layouts == found.sizes
    for gpus in range(1, 9):
        before, after = (
            min((each.step_seconds for each in chosen.layouts if each.world_size <= gpus), default=inf)
            for chosen in (without, found)
        )
        assert after <= before
    replicas = next(each for each in found.layouts if each.layout == "tp 1 × pp 1 × dp 8")
    assert replicas.recompute == "offload 30 + none 2"
    assert any("crosses the bus in" in why and "on the GPU, 6.9 GiB per GPU are lacking" in why for why in replicas.why)
    on_cpus = left(resources={"gpus_per_worker": 0})
    assert {each.recompute for each in choose_layouts(on_cpus, HOSTS).layouts} == {"none"}
    with pytest.raises(NothingFits):
        choose_layouts(spec, Basis(node_memory_bytes=10**9))


def test_a_chosen_layout_that_fits_in_no_other_way_has_the_optimizers_state_on_the_host() -> None:
    def left(recompute: str, **changes: Any) -> JobSpec:
        training = job(1, 1).training.model_dump() | {"sequence_length": 4096}
        elasticity = {"layouts": "auto", "gpus": {"min": 1, "max": 4}}
        return job(1, 1, recompute=recompute, training=training, elasticity=elasticity, **changes)

    one = Layout(1, 1, 1)
    for recompute in ("auto", "latent"):
        spec = left(recompute)
        on = HOSTS.machine(spec)
        without, found = (choose_layouts(spec, basis) for basis in (Basis(), HOSTS))
        assert one not in without.sizes
        first, *others = found.layouts
        assert (Layout.of(first), first.optimizer_offload) == (one, 1)
        assert {each.optimizer_offload for each in others} == {0}, "they fit without"
        assert first.memory_bytes <= 40e9 * (1 - SPARE)
        assert any("the optimizer's state is in the host's memory" in why for why in first.why)
        resolved = spec.with_layouts(found.sizes)
        expected = at(resolved, one, on)
        assert expected.parallelism.optimizer_offload == 1
        assert at(expected, one, on).parallelism == expected.parallelism, "it is the same once it is resolved"
        assert demand_of(resolved, HOSTS).layouts == found.sizes
        assert plan(resolved, on).shapes[0].optimizer_offload == 1
        gang = FakeGang(resolved, Orders(one, (one,), Cause.LIMITS_CHANGED), "ab", HOSTS)
        gang.wait(START_SECONDS)
        assert [start.spec.parallelism for start in gang.of(port.StartReplica)] == [expected.parallelism]
        assert at(resolved, Layout(2, 1, 1), on).parallelism.optimizer_offload == 0
        assert at(resolved, one).parallelism.optimizer_offload == 0, "hosts are not known"
    little = Basis(node_memory_bytes=90 * 10**9)  # masters, moments and their copies take 102 GB
    assert at(spec, one, little.machine(spec)).parallelism.optimizer_offload == 0
    listed = left("latent").model_copy(update={"elasticity": None})
    assert at(listed, one, HOSTS.machine(listed)).parallelism.optimizer_offload == 0
    on_cpus = left("latent", resources={"gpus_per_worker": 0})
    assert at(on_cpus, one, HOSTS.machine(on_cpus)).parallelism.optimizer_offload == 0


def test_processes_that_only_keep_the_state_need_as_much_wherever_a_gang_has_it() -> None:
    layout, needed = Layout(2, 1, 1), set()
    for recompute, share in (("latent", 0.0), ("latent", 1.0), ("offload", 0.5), ("auto", 1.0)):
        spec = job(2, 2).with_parallelism(recompute=recompute, optimizer_offload=share)
        needed.add(bytes_to_keep(spec, layout))
    assert needed == {3 * sum(held_in_state(rank_memory(job(2, 2, recompute="latent"), layout)))}


def held_in_state(memory: Memory) -> tuple[int, int, int]:
    return memory.weights, memory.gradients, memory.optimizer


@pytest.mark.full
def test_explanations_name_the_bus() -> None:
    spec = job(1, 1)
    on = HOSTS.machine(spec)
    found = search(spec, 8, on, 40e9, 2)
    assert found.choices[0].job.parallelism.keeps_on_host
    why = (
        "what blocks keep in the host's memory crosses the bus in 1.81 s, at 25.6 GB/s, of which passes hide all but 0"
    )
    assert any(reason.startswith(why) for reason in reasons(found, 40e9, on))
    slow = replace(on, profile=replace(on.profile, host_bandwidth=on.profile.host_bandwidth / 40))
    (forced,) = search(spec, 1, slow, 40e9, 1).choices
    assert largest_part(forced).startswith("copies over the bus (")
    assert sum(forced.parts.values()) == pytest.approx(forced.seconds.total)
    on = replace(on, node_memory_bytes=2 * 10**11)
    first = search_as_reported(spec, 2, on, 40e9).choices[0]
    told = sensitivities(spec, 2, on, 40e9, first)
    assert any(line.startswith("with the size of hosts' memory -20%: ") for line in told)
