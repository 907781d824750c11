"""Shapes on nodes, and which is best: tables, and what holds whatever the nodes are."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.config import JobSpec, Layout
from boost_core.hardware import DEVICES, LINKS, LOOPBACK
from boost_core.plan.machine import machine_for
from boost_core.plan.report import fastest, step_parts, step_seconds
from boost_core.plan.resolve import fits, own_slots, place, why_not
from boost_core.plan.throughput import collective_seconds, pairs_of_token
from tests.jobs import tiny_job

LAYOUTS = [[1, 1], [2, 1], [1, 2], [4, 1], [2, 2]]


def elastic(layouts=None, low: int = 1, high: int = 4, **changes) -> JobSpec:
    tensor, pipeline = layouts[0] if layouts else (1, 1)
    return tiny_job(
        "corpus", "checkpoints",
        parallelism={"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline},
        training={"global_batch_size": 32},
        elasticity={"data_parallel_size": {"min": low, "max": high}, "layouts": layouts},
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "slots", "placement", "expected"),
    [
        (Layout(1, 1, 3), [2, 1], "PACK", [2, 1]),
        (Layout(1, 1, 4), [2, 1], "PACK", None),
        (Layout(1, 1, 1), [], "PACK", None),
        # A tensor parallel group is whole on a node.
        (Layout(2, 1, 2), [3, 3], "PACK", [2, 2]),
        (Layout(4, 1, 1), [3, 3], "PACK", None),
        (Layout(2, 2, 1), [3, 3], "PACK", [2, 2]),
        # So is a replica, if asked for.
        (Layout(2, 2, 1), [3, 3], "STRICT_PACK", None),
        (Layout(2, 2, 2), [9, 3], "STRICT_PACK", [8, 0]),
        (Layout(2, 2, 2), [7, 4], "STRICT_PACK", [4, 4]),
        # Few nodes, and of these the fullest; or many.
        (Layout(1, 1, 2), [4, 2, 3], "PACK", [0, 2, 0]),
        (Layout(1, 1, 5), [4, 2, 3], "PACK", [4, 1, 0]),
        (Layout(1, 1, 5), [4, 2, 3], "SPREAD", [2, 2, 1]),
        (Layout(2, 1, 3), [8, 2], "SPREAD", [4, 2]),
        (Layout(1, 1, 2), [1, 1, 1], "SPREAD", [1, 1, 0]),
    ],
)
def test_places(layout: Layout, slots: list[int], placement: str, expected: list[int] | None) -> None:
    assert place(layout, slots, placement) == expected
    assert fits(layout, slots, placement) == (expected is not None)


def test_a_gang_fits_where_it_is_and_so_does_what_its_groups_split_into() -> None:
    assert own_slots(Layout(2, 2, 2)) == [2, 2, 2, 2]
    assert own_slots(Layout(2, 2, 2), "STRICT_PACK") == [4, 4]
    assert fits(Layout(1, 1, 8), own_slots(Layout(2, 2, 2)))
    assert not fits(Layout(4, 1, 1), own_slots(Layout(2, 2, 2)))


def legal(spec: JobSpec, slots: list[int]) -> list[Layout]:
    """What of a job's layouts the scheduler chooses from."""
    return [layout for layout in spec.layouts() if fits(layout, slots, spec.resources.placement)]


def best(spec: JobSpec, slots: list[int]) -> Layout | None:
    """What it chooses."""
    return fastest(spec, legal(spec, slots), partial(step_seconds, spec))


def test_only_what_a_job_allows_is_tried() -> None:
    assert legal(elastic([[2, 1]], 1, 4), [8]) == [
        Layout(2, 1, 1),
        Layout(2, 1, 2),
        Layout(2, 1, 4),
    ]  # 3 splits no batch
    assert legal(elastic([[2, 1]], 2, 4), [3]) == []
    rigid = tiny_job("corpus", "checkpoints", parallelism={"tensor_parallel_size": 2})
    assert legal(rigid, [8]) == [Layout(2, 1, 1)]


def test_the_best_is_the_fastest() -> None:
    spec = elastic(LAYOUTS)
    assert best(spec, [1]) == Layout(1, 1, 1)
    assert best(spec, [4]) == min(legal(spec, [4]), key=lambda layout: step_seconds(spec, layout))
    assert best(spec, []) is None


def test_of_equally_fast_shapes_the_smaller_then_the_jobs_own_layout() -> None:
    spec = elastic([[1, 2], [2, 1], [1, 1]])
    assert fastest(spec, [Layout(1, 2, 2), Layout(1, 1, 1)], lambda _: 1.0) == Layout(1, 1, 1)
    assert fastest(spec, [Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)], lambda _: 1.0) == Layout(1, 2, 1)


@pytest.mark.parametrize(
    ("spec", "slots", "reason"),
    [
        (elastic([[4, 1]]), [2, 1], "tp 4 needs 4 workers on one node; the largest has 2"),
        (elastic([[4, 1]]), [], "tp 4 needs 4 workers on one node; the largest has 0"),
        (elastic([[4, 1]], resources={"gpus_per_worker": 1}), [2],
         "tp 4 needs 4 GPUs on one node; the largest has 2"),
        (elastic([[4, 1], [2, 1]], 4, 4), [3, 3],
         "tp 2 × pp 1 × dp 4 needs 8 workers in groups of 2; there is room for 4"),
        (elastic(None, 4, 4), [3], "tp 1 × pp 1 × dp 4 needs 4 workers; there is room for 3"),
        (elastic([[2, 2]], resources={"placement": "STRICT_PACK"}), [3, 3],
         "a replica of tp 2 × pp 2 needs 4 workers on one node; the largest has 3"),
    ],
)  # fmt: skip
def test_reasons(spec: JobSpec, slots: list[int], reason: str) -> None:
    assert best(spec, slots) is None
    assert why_not(spec, slots, spec.layouts()) == reason


SPECS = [
    elastic(LAYOUTS, low, high, resources={"placement": placement, "gpus_per_worker": gpus})
    for placement in ("PACK", "STRICT_PACK", "SPREAD")
    for low, high in ((1, 4), (2, 16))
    for gpus in (0, 1)
]


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(spec=st.sampled_from(SPECS), slots=st.lists(st.integers(0, 9), max_size=5))
def test_what_is_chosen_fits_and_nothing_that_fits_is_predicted_faster(spec: JobSpec, slots: list[int]) -> None:
    placement, choice = spec.resources.placement, best(spec, slots)
    fitting = [layout for layout in spec.layouts() if place(layout, slots, placement)]
    assert fitting == legal(spec, slots)
    assert (choice is None) == (not fitting)
    if choice:
        assert choice in fitting
        assert all(step_seconds(spec, choice) <= step_seconds(spec, other) for other in fitting)
    for layout in fitting:
        taken = place(layout, slots, placement)
        together = layout.tp * (layout.pp if placement == "STRICT_PACK" else 1)
        assert sum(taken) == layout.world_size
        assert all(ranks <= slot and ranks % together == 0 for ranks, slot in zip(taken, slots, strict=True))


def of_7b(**parallelism) -> JobSpec:
    return JobSpec.model_validate({
        "name": "large",
        "model": {"preset": "7b", "vocab_size": 32_000},
        "parallelism": parallelism,
        "training": {"steps": 1, "sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 1,
                     "precision": "bf16"},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
    })  # fmt: skip


def seconds(**parallelism) -> float:
    spec = of_7b(**parallelism)
    return step_seconds(spec, Layout.of(spec.parallelism))


def test_fp8_saves_at_most_half_of_two_thirds_of_the_products_and_nothing_without_it() -> None:
    def ratio(gpu: str) -> float:
        specs = (
            of_7b().model_copy(
                update={
                    "training": of_7b().training.model_copy(update={"precision": precision, "micro_batch_size": 4}),
                    "resources": of_7b().resources.model_copy(update={"accelerator_type": gpu}),
                }
            )
            for precision in ("fp8", "bf16")
        )
        fp8, bf16 = (step_seconds(spec, Layout.of(spec.parallelism)) for spec in specs)
        return fp8 / bf16

    # Attention, the head, weight gradients and exchanges are as they were.
    assert 2 / 3 < ratio("H100") < 0.9
    assert ratio("A100") == 1


def test_replicas_share_the_micro_batches_and_pay_for_the_exchange() -> None:
    one, two, four = (seconds(data_parallel_size=size) for size in (1, 2, 4))
    assert one / 2 < two < one
    assert two / 2 < four < two
    # With ZeRO's second stage gradients are sent once a micro-batch.
    assert seconds(data_parallel_size=4, zero_stage=2) > four


def test_a_pipeline_idles_less_with_more_stages_a_rank_and_less_still_when_weight_gradients_fill_it() -> None:
    plain, interleaved, filled = (
        seconds(pipeline_parallel_size=8, pipeline_schedule=schedule)
        for schedule in ("1f1b", "interleaved_1f1b", "zero_bubble")
    )
    assert filled < interleaved < plain
    # 64 micro-batches and 7 that are idle, of at least an eighth of the work.
    assert plain > seconds() / 8 * 71 / 64 * 0.99


def test_btp_scales_further_than_vanilla_and_recomputing_costs() -> None:
    assert seconds(tensor_parallel_size=4) < seconds(tensor_parallel_size=4, strategy="vanilla")
    assert seconds(tensor_parallel_size=4) < seconds(tensor_parallel_size=4, recompute="latent")
    assert seconds(tensor_parallel_size=4, recompute="latent") < seconds(tensor_parallel_size=4, recompute="full")


def test_a_small_model_does_not_become_faster_by_cutting_its_kernels() -> None:
    gpus = tiny_job("corpus", "checkpoints", resources={"gpus_per_worker": 1})
    assert step_seconds(gpus, Layout(1, 1, 1)) < step_seconds(gpus, Layout(4, 1, 1))


def test_the_loopback_is_as_measured() -> None:
    for payload, milliseconds in ((2**18, 5), (2**25, 62)):
        assert collective_seconds(LOOPBACK, "all_reduce", 4, payload) == pytest.approx(milliseconds / 1e3, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "sheet", "link", "network"),
    [("A100", 312e12, "nvlink-a100", "fabric-200g"), ("H200", 989e12, "nvlink-h200", "fabric-400g"),
     ("MI300X", 312e12, "nvlink-a100", "fabric-200g"), (None, 312e12, "nvlink-a100", "fabric-200g")],
)  # fmt: skip
def test_machines_of_gpus(kind: str | None, sheet: float, link: str, network: str) -> None:
    machine = machine_for(elastic(resources={"gpus_per_worker": 1, "accelerator_type": kind}).resources, "bf16")
    assert sheet / 2 < machine.profile.product_flops < sheet
    assert [level.link for level in machine.cluster.levels] == [LINKS[link], LINKS[network]]


def test_cores_of_a_machine_without_gpus_add_up() -> None:
    one, four = (machine_for(elastic(resources={"cpus_per_worker": cores}).resources, "fp32") for cores in (1, 4))
    assert four.profile.product_flops == 4 * one.profile.product_flops
    assert one.cluster == four.cluster


def test_every_gpu_has_rates_of_products_and_of_its_memory() -> None:
    for device in DEVICES:
        rates = device.tflops["bf16"], device.tflops["fp32"]
        if rates[0] > rates[1]:  # else its tensor cores lack bf16
            assert 70 < rates[0] * 1e12 / device.bandwidth < 500  # FLOPs a byte


def test_a_pipeline_sends_and_a_larger_one_sends_no_less() -> None:
    spec = of_7b()
    alone, two, sixteen = (step_parts(spec, Layout(1, pp, 1)) for pp in (1, 2, 16))
    assert alone.sends == alone.idle == alone.reduction == 0
    # Both ranks of two receive once; one in the middle twice.
    payload = 64 * 4096 * 4096 * 2
    assert two.sends == pytest.approx(payload / LINKS["nvlink-h200"].bytes_per_second, rel=0.2)
    assert sixteen.sends == pytest.approx(2 * two.sends)


def test_windows_cost_what_they_show_and_documents_no_more_than_one() -> None:
    hopper = of_7b()
    resources = hopper.resources.model_copy(update={"accelerator_type": "A100"})
    spec = hopper.model_copy(update={"resources": resources})  # on which the same kernel computes all of these

    def documents_apart(spec: JobSpec) -> JobSpec:
        return spec.model_copy(update={"data": spec.data.model_copy(update={"documents_apart": True})})

    apart, length = documents_apart(spec), spec.training.sequence_length

    def windowed(window: int) -> JobSpec:
        return spec.model_copy(update={"model": spec.model.model_copy(update={"sliding_window": window})})

    whole = step_seconds(spec, Layout(1, 1, 1))
    assert step_seconds(apart, Layout(1, 1, 1)) == step_seconds(windowed(length), Layout(1, 1, 1)) == whole
    assert step_seconds(windowed(512), Layout(1, 1, 1)) < step_seconds(windowed(2048), Layout(1, 1, 1)) < whole
    # Documents take flash attention also where cuDNN's is faster.
    assert step_seconds(documents_apart(hopper), Layout(1, 1, 1)) > step_seconds(hopper, Layout(1, 1, 1))
    shown = [sum(min(place + 1, window) for place in range(length)) / length for window in (512, length)]
    assert [pairs_of_token(windowed(window)) for window in (512, length)] == pytest.approx(shown)
