from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from boost_core.architecture import block_matrix_parameters, model_flops_per_token, precise_step_flops
from boost_core.config import JobSpec, RecomputeMode
from boost_core.config.parallelism import Layout, chunk_tokens
from boost_core.context.selection import ContextPlanner, attention_layer
from boost_core.hardware import device_named
from boost_core.optim.loro_muon import orthogonalized, riemannian_step
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.plan.machine import Basis, machine_for
from boost_core.plan.memory import rank_memory
from boost_core.plan.report import Plan, context_report, fastest, nothing_fits, plan, presets, step_seconds
from boost_core.plan.throughput import block_work
from boost_core.train.loop import Comparison
from boost_core.train.profiling import PeakMemory


def job(preset: str = "7b", **sections: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "model": {"preset": preset, "vocab_size": 32_000},
        "training": {
            "steps": 100, "sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 4, "precision": "bf16",
        },
        "parallelism": {"tensor_parallel_size": 4},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
    }  # fmt: skip
    merged = {name: content | sections.pop(name, {}) for name, content in defaults.items()}
    return JobSpec.model_validate({"name": "planned"} | merged | sections)


ELASTIC = {"data_parallel_size": {"min": 1, "max": 16}, "layouts": [[1, 1], [4, 1], [4, 2]]}


def test_muon_keeps_a_moment_less_of_nearly_all_of_a_large_model() -> None:
    adamw, muon = (plan(job(optimizer={"kind": kind})) for kind in ("adamw", "muon"))
    assert muon.trainable_bytes_per_parameter == adamw.trainable_bytes_per_parameter - 4
    assert muon.shapes[0].memory.optimizer < 0.75 * adamw.shapes[0].memory.optimizer


def loro(gpu: str, every: int) -> JobSpec:
    return job(
        model={"family": "svd"},
        optimizer={"kind": "loro", "loro": {"exact_every_steps": every}},
        resources={"accelerator_type": gpu},
    )


@pytest.mark.parametrize(("gpu", "every", "noted"), [("H100", 500, False), ("A10", 50, True)])
def test_exact_steps_of_loro_are_spread_over_the_others_and_noted_if_they_take_long(
    gpu: str, every: int, noted: bool
) -> None:
    often, seldom = plan(loro(gpu, every)), plan(loro(gpu, 10**9))
    flops = precise_step_flops("loro", job(model={"family": "svd"}).model, 32, 4)
    device = device_named(gpu)
    seconds = often.shapes[0].step_seconds - seldom.shapes[0].step_seconds
    assert device is not None and seconds == pytest.approx(flops / (device.tflops["fp64"] * 1e12) / every, rel=1e-4)
    notes = [note for note in often.notes if "exact step of LORO" in note]
    assert bool(notes) == noted
    assert all("takes at least 170 s in fp64" in note for note in notes)
    assert not any("exact step of LORO" in note for note in seldom.notes)


@pytest.mark.parametrize(("gpu", "noted"), [("A10", True), ("V100", False)])
def test_muons_arithmetic_in_fp64_takes_its_time_and_is_noted_if_that_is_long(gpu: str, noted: bool) -> None:
    resources = {"accelerator_type": gpu}
    training = {"precision": "fp32", "global_batch_size": 256}
    adamw, muon = (
        plan(job(optimizer={"kind": kind}, resources=resources, training=training)) for kind in ("adamw", "muon")
    )
    flops = precise_step_flops("muon", job().model, 32, 4)
    device = device_named(gpu)
    assert device is not None
    least = flops / (device.tflops["fp64"] * 1e12)
    assert muon.shapes[0].step_seconds - adamw.shapes[0].step_seconds == pytest.approx(least, rel=0.05)
    assert any("Muon takes at least" in note for note in muon.notes) == noted


def test_the_products_of_muons_update_are_counted() -> None:
    rank, rows = 4, (3000, 2000)
    with FlopCounterMode(display=False) as counter:
        for count in rows:
            orthogonalized(torch.randn(1, rank, count), Communicator(None, "tp", CommunicationLedger()))
    model = job(model={"family": "svd"}).model.model_copy(update={"num_hidden_layers": 1})
    assert counter.get_total_flops() == 2 * 40 * rank**3 + 4 * sum(rows) * rank**2
    pairs, sides = 7, 4 * 2 * 4096 + 3 * (4096 + 11008)
    assert precise_step_flops("muon", model, 1, 1) == 2 * pairs * 40 * 1024**3 + 4 * sides * 1024**2


def test_a_trainers_median_is_compared_with_a_lazy_step_of_loro() -> None:
    def predicted(every: int) -> float:
        state: Any = SimpleNamespace(spec=loro("A10", every), step=10)
        return Comparison(state, PeakMemory(torch.device("cpu")))._report().predicted_step_seconds

    assert predicted(50) == pytest.approx(predicted(10**9))
    assert predicted(50) < 0.95 * step_seconds(loro("A10", 50), Layout(4, 1, 1))
    assert predicted(1) > 2 * predicted(50)


def test_the_products_of_an_exact_step_are_counted() -> None:
    model = job(model={"family": "svd"}).model.model_copy(update={"num_hidden_layers": 1})
    rank, rows = 4, (3000, 2000)
    factors = [torch.randn(count, rank) for count in rows]
    with FlopCounterMode(display=False) as counter:
        riemannian_step(*factors, *map(torch.randn_like, factors), 0.1, Communicator(None, "tp", CommunicationLedger()))
    assert counter.get_total_flops() == pytest.approx(26 * sum(rows) * rank**2, rel=0.01)
    pairs, sides = 7, 4 * 2 * 4096 + 3 * (4096 + 11008)
    one, many = (precise_step_flops("loro", model, 1, size) for size in (1, 10**9))
    assert one - many == pytest.approx(26 * sides * 1024**2)
    assert many == pytest.approx(282 * pairs * 1024**3, rel=1e-6)


def test_a_plan_of_one_shape() -> None:
    spec = job()
    planned = plan(spec)
    assert planned.parameters == 2_820_935_680
    assert planned.trainable_bytes_per_parameter == 18
    assert planned.flops_per_token == model_flops_per_token(spec.model, 4096)
    assert planned.tokens_per_step == 64 * 4096
    (layout,) = planned.shapes
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size) == (4, 1, 1)
    assert layout.world_size == 4
    assert layout.step_seconds == step_seconds(spec, Layout(4, 1, 1))
    assert layout.step_seconds == pytest.approx(sum(layout.step_parts.model_dump().values()))
    assert layout.step_parts.arithmetic > layout.step_parts.exchange > layout.step_parts.update > 0
    assert layout.tokens_per_second == pytest.approx(64 * 4096 / layout.step_seconds)
    assert layout.total_seconds == pytest.approx(100 * layout.step_seconds)
    gpus = spec.resources.gpus_per_worker
    assert layout.gpu_hours == pytest.approx(4 * gpus * 100 * layout.step_seconds / 3600)
    assert layout.memory.model_dump() == vars(rank_memory(spec, Layout(4, 1, 1)))
    # 4 exchanges forward and backward in 32 blocks; 7r and two statistics.
    assert layout.communication.all_reduces == 32 * 8
    assert layout.communication.elements_per_token == 32 * 2 * (7 * 1024 + 2)
    assert planned.fastest == 0


@pytest.mark.parametrize(("preset", "layout"), [("1b", (1, 1)), ("3b", (2, 1)), ("7b", (4, 1)), ("13b", (4, 2))])
def test_what_boost_ran_on_80_gigabytes_is_planned_to_fit(preset: str, layout: tuple[int, int]) -> None:
    """Sequences of 4096, micro-batches of 4, bf16, A100 of 80 GB (BOOST's systems runs); one micro-batch a stage."""
    tensor, pipeline = layout
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    spec = job(
        preset, parallelism=sizes | {"recompute": "latent"}, training={"global_batch_size": 4 * pipeline},
        model={"intermediate_size": 5504} if preset == "1b" else {},
    )  # fmt: skip
    assert plan(spec).shapes[0].fits_device


@pytest.mark.parametrize(
    ("preset", "changes", "warned"),
    [
        ("1b", {}, ["model.intermediate_size=5461"]),
        ("1b", {"intermediate_size": 5464}, []),
        ("1b", {"vocab_size": 50257, "intermediate_size": 5464}, ["model.vocab_size=50257"]),
        ("7b", {}, []),
    ],
)
def test_sizes_whose_rows_are_read_slowly_are_noted(preset: str, changes: dict[str, int], warned: list[str]) -> None:
    sizes = {"tensor_parallel_size": 1 if preset == "1b" else 4}
    notes = [note for note in plan(job(preset, parallelism=sizes, model=changes)).notes if "multiple of 16" in note]
    assert [note.partition(" ")[0] for note in notes] == warned
    assert all(note.endswith("5464" if "intermediate" in note else "50256") for note in notes)


def test_the_fastest_is_the_schedulers_choice_among_those_that_fit() -> None:
    spec = job(elasticity=ELASTIC)
    planned = plan(spec)
    fits = [bool(layout.fits_device) for layout in planned.shapes]
    assert True in fits
    assert False in fits
    fitting = [layout for layout, is_fit in zip(spec.layouts(), fits, strict=True) if is_fit]
    assert planned.fastest is not None
    assert spec.layouts()[planned.fastest] == fastest(spec, fitting, partial(step_seconds, spec))
    assert any(f"{fits.count(False)} of {len(fits)} layouts" in note for note in planned.notes)


def test_where_nothing_fits_the_plan_says_what_to_change() -> None:
    planned = plan(
        job("40b", parallelism={"zero_stage": 0, "tensor_parallel_size": 2}, training={"precision": "fp32"},
            elasticity={"data_parallel_size": {"min": 2, "max": 2}})
    )  # fmt: skip
    assert planned.fastest is None
    assert not any(layout.fits_device for layout in planned.shapes)
    (note,) = (note for note in planned.notes if "no layout fits" in note)
    for remedy in (
        "tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size=4", "recompute=auto",
        "zero_stage=1", "precision=bf16",
    ):  # fmt: skip
        assert remedy in note


def test_what_is_done_already_is_not_advised() -> None:
    planned = plan(
        job("40b", parallelism={"recompute": "full", "tensor_parallel_size": 2}, training={"micro_batch_size": 1})
    )
    (note,) = (note for note in planned.notes if "no layout fits" in note)
    assert not any(word in note for word in ("recompute", "micro_batch_size", "precision", "zero_stage"))


@pytest.mark.parametrize(
    ("resources", "known"),
    [
        ({"accelerator_type": "A100"}, 80e9),
        ({"accelerator_type": "A100-40G"}, 40e9),
        ({"accelerator_type": "H100"}, 80e9),
        ({"accelerator_type": "H200"}, 141e9),
        ({"accelerator_type": None, "node_labels": {"ray.io/accelerator-type": "H200"}}, 141e9),
        ({"accelerator_type": "L4"}, 22e9),
        ({"accelerator_type": "P40"}, None),
        ({"accelerator_type": None}, None),
        ({"gpus_per_worker": 0, "accelerator_type": "H100"}, None),
    ],
)
def test_memory_is_compared_with_a_device_that_is_known(resources: dict[str, Any], known: float | None) -> None:
    planned = plan(job(resources=resources))
    (layout,) = planned.shapes
    assert layout.device_memory_bytes == known
    assert layout.fits_device == (None if known is None else layout.memory.total <= known)
    assert planned.fastest == (None if layout.fits_device is False else 0)
    asks = any("nothing is said of what fits; set resources.accelerator_type" in note for note in planned.notes)
    assert asks == (known is None and resources.get("gpus_per_worker") != 0)


def test_one_rank_sends_nothing_and_full_recomputation_sends_forward_twice() -> None:
    alone, once, twice = (
        plan(job(parallelism=parallelism)).shapes[0].communication
        for parallelism in (
            {"tensor_parallel_size": 1},
            {"tensor_parallel_size": 4},
            {"tensor_parallel_size": 4, "recompute": "full"},
        )
    )
    assert (alone.all_reduces, alone.elements_per_token) == (0, 0)
    assert twice.all_reduces == once.all_reduces * 3 // 2
    assert twice.elements_per_token - once.elements_per_token == 32 * (7 * 1024 + 2)


@pytest.mark.parametrize(
    ("parallelism", "blocks"),
    [
        ({"pipeline_layers_per_stage": [7, 8, 9, 8]}, 9),
        ({"pipeline_layers_per_stage": [5, 4, 4, 4, 3, 4, 4, 4], "pipeline_schedule": "interleaved_1f1b"}, 8),
    ],
)
def test_a_rank_sends_what_its_own_stages_exchange(parallelism: dict[str, Any], blocks: int) -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 4}
    sent = plan(job(parallelism=sizes | parallelism)).shapes[0].communication
    assert (sent.all_reduces, sent.elements_per_token) == (8 * blocks, 2 * blocks * (7 * 1024 + 2))


def test_a_plan_travels_as_json_and_refuses_what_it_does_not_know() -> None:
    planned = plan(job(elasticity=ELASTIC))
    assert Plan.model_validate_json(planned.model_dump_json()) == planned
    with pytest.raises(ValidationError, match="surprise"):
        Plan.model_validate(planned.model_dump() | {"surprise": 1})


@pytest.mark.parametrize(
    ("name", "low_rank", "dense"),
    [("60m", 42.8, 58.1), ("130m", 94.0, 134.1), ("350m", 185.2, 368.0), ("1b", 609.3, 1339), ("7b", 2821, 6738)],
)
def test_presets_have_the_parameters_of_the_cola_paper(name: str, low_rank: float, dense: float) -> None:
    (preset,) = (preset for preset in presets().presets if preset.name == name)
    for family, millions in (("cola", low_rank), ("svd", low_rank), ("dense", dense)):
        assert preset.parameters[family] / 1e6 == pytest.approx(millions, abs=0.5 if millions > 1000 else 0.05)
    assert preset.parameters["lax"] > preset.parameters["cola"]


def test_presets_are_all_there_from_the_smallest_on() -> None:
    names = [preset.name for preset in presets().presets]
    assert names == ["tiny", "60m", "130m", "350m", "1b", "3b", "7b", "13b", "30b", "40b"]
    tiny = presets().presets[0]
    assert (tiny.hidden_size, tiny.intermediate_size, tiny.num_hidden_layers, tiny.num_attention_heads, tiny.rank) == (
        128, 344, 4, 4, 32,
    )  # fmt: skip


LONG = {
    "model": {"family": "cola"},
    "parallelism": {"tensor_parallel_size": 4, "context_parallel_size": 16, "recompute": "full"},
    "training": {"sequence_length": 524288, "micro_batch_size": 1},
    "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
}  # fmt: skip


def test_a_long_job_is_planned_with_what_other_sizes_chunks_and_exchanges_would_take() -> None:
    spec = job(**{name: dict(section) for name, section in LONG.items()})
    (shape,) = plan(spec).shapes
    context = shape.context
    assert context is not None
    own, *others = context.sizes
    assert (own.memory_bytes, own.step_seconds) == (shape.memory.total, shape.step_seconds)
    assert [(other.context_parallel_size, other.world_size) for other in others] == [(8, 64), (32, 128)]
    for other in others:
        layout = Layout(4, 1, other.world_size // (4 * other.context_parallel_size), other.context_parallel_size)
        assert other.memory_bytes == rank_memory(spec, layout).total
        assert other.step_seconds == step_seconds(spec, layout)
        assert other.fits_device == (other.memory_bytes <= 80e9)
    short = job(**LONG | {"training": {"sequence_length": 131072, "micro_batch_size": 1}})
    largest = context_report(short, Layout(4, 1, 1, 64), machine_for(spec.resources, "bf16"))
    assert largest is not None and [each.context_parallel_size for each in largest.sizes] == [64, 32]
    assert (context.chunk_tokens, context.chunks) == (chunk_tokens(524288, 16), 8)
    chunks = {each.chunk_tokens: each for each in context.chunk_sizes}
    assert set(chunks) == {2048, 4096, 8192}
    # Two nodes' worth of the attention of 32K tokens, of half of the sequence in the mean: 14 FLOPs a pair and element.
    least = 14 * 1024 * 32768 * 524288 / 2 / (0.30 * 989e12)
    assert all(1 <= each.imbalance < 1.05 and least < each.seconds < 1.2 * least for each in chunks.values())


def test_a_long_job_with_sparse_attention_needs_less_time_and_says_how_its_keys_come() -> None:
    sections = {name: dict(section) for name, section in LONG.items()}
    sections["parallelism"]["context"] = {"exchange": "keys"}
    (dense,) = plan(job(**sections)).shapes
    sections["training"]["attention"] = {"kind": "vertical_slash"}
    (sparse,) = plan(job(**sections)).shapes
    assert sparse.context is not None
    assert sparse.step_seconds < dense.step_seconds
    assert [each.exchange for each in sparse.context.exchanges] == ["keys"]
    _, chunk, exchange = sparse.context.why
    assert "with sparse attention only the keys seen, some heads' in each of up to 4" in chunk
    assert exchange.endswith(" at most, as each head is sent only what it sees")


def test_a_long_job_sends_what_takes_least_and_as_much_as_its_plan_does() -> None:
    spec = job(**{name: dict(section) for name, section in LONG.items()})
    (shape,) = plan(spec).shapes
    assert shape.context is not None
    chosen, other = shape.context.exchanges
    latents, keys = ({each.level: each.bytes for each in exchange.links} for exchange in (chosen, other))
    assert (chosen.exchange, other.exchange) == ("latents", "keys")
    assert chosen.seconds + chosen.projection_seconds < other.seconds
    assert other.projection_seconds == 0
    assert 4 * latents["fabric"] == keys["fabric"]  # r = d/4
    assert latents["node"] == keys["node"] + 3 * latents["fabric"]  # three other tensor parallel ranks' shares
    # The rank that is sent most by the trainer's plan of one document, by its nodes of two context parallel ranks.
    dealing = ContextPlanner.of(spec, machine_for(spec.resources, "bf16"))
    received = [[0, 0] for _ in range(16)]
    for sent in dealing.plan((524288,)).keys:
        received[sent.receiver][sent.sender // 2 != sent.receiver // 2] += dealing.chunk
    size = attention_layer(spec).key_bytes
    assert [size * max(rank[level] for rank in received) for level in (0, 1)] == [keys["node"], keys["fabric"]]
    assert chosen.seconds == pytest.approx(latents["node"] / 360e9 + latents["fabric"] / 40e9, rel=0.02)


def test_a_long_job_whose_tasks_may_move_has_room_for_them_and_says_so() -> None:
    added, said = _moving(exchange="keys", recompute="full")
    # Of two chunks of 4K tokens, with 8 heads of 128: what goes, what comes, its parts, and the queries' gradients.
    assert added == 8192 * (3 * (3 * 2048 + 32) + 4096 + 4 * 2048)
    assert said.endswith("their queries and results are 32.25 MiB per layer forward and 64.25 MiB backward")


def test_tasks_that_move_as_latents_have_room_for_what_stays_where_it_is_computed() -> None:
    (added, said), (kept, _) = (_moving(exchange="auto", recompute=each) for each in ("full", "latent"))
    # Shares of 256 columns and latents of 1024, queries and their gradients in bf16 and fp32; the gradients of all
    # tokens' latents; of two weights; and angles.
    of_tokens = 6 * 512 + 6 * 2048 + 4 * 2048 + 4096 + 24 * 64
    assert added == 8192 * of_tokens + 32768 * (512 + 2048) + 2 * 1024 * 2048
    # Each of 32 blocks keeps outputs, log-sum-exps and shares.
    assert kept - added == 32 * 8192 * (2048 + 32 + 512)
    assert said.endswith("latents of their queries and outputs are 8 MiB per layer forward and 8 MiB backward")


def _moving(exchange: str, recompute: str) -> tuple[int, str]:
    """What is added to memory if tasks may move, and what is said of it."""
    sections = {name: dict(section) for name, section in LONG.items()}
    sections["parallelism"] |= {"context": {"exchange": exchange}, "recompute": recompute}
    (fixed,) = plan(job(**sections)).shapes
    sections["parallelism"]["context"] = {"exchange": exchange, "pool": "tasks"}
    (moving,) = plan(job(**sections)).shapes
    assert fixed.context is not None
    assert moving.context is not None
    assert (fixed.context.moved_chunks, moving.context.moved_chunks) == (0, 2)
    *_, why = moving.context.why
    assert why.startswith("the attention of up to 2 of a rank's chunks is computed by other ranks where that is faster")
    return moving.memory.total - fixed.memory.total, why


def test_halves_of_a_long_jobs_micro_batches_hide_what_attention_does_not() -> None:
    """Of two sequences whose keys take longer than attention; where nothing hides them, more calls take longer."""
    sections = {name: dict(section) for name, section in LONG.items()}
    sections["training"] = {"sequence_length": 131072, "global_batch_size": 2, "micro_batch_size": 2}
    sections["parallelism"] |= {"recompute": "none", "context": {"exchange": "keys"}}
    whole = job(**sections)
    halves = job(**sections | {"parallelism": sections["parallelism"] | {"split_micro_batch": True}})
    machine, layout = machine_for(whole.resources, "bf16"), Layout.of(whole.parallelism)
    nothing, hiding = (
        replace(machine, profile=replace(machine.profile, overlap=share, long_overlap=share)) for share in (0.0, 1.0)
    )
    (apart, longer), (alone, hidden) = (
        [step_seconds(each, layout, on) for each in (whole, halves)] for on in (nothing, hiding)
    )
    assert apart < longer
    assert hidden < alone


def on_four_gpus(sequences: int) -> JobSpec:
    """7B in micro-batches of some sequences, one a step."""
    return JobSpec.model_validate(
        {
            "name": "halves", "model": {"preset": "7b", "vocab_size": 32_000},
            "training": {"steps": 1, "sequence_length": 4096, "global_batch_size": sequences,
                         "micro_batch_size": sequences, "precision": "bf16"},
            "parallelism": {"tensor_parallel_size": 4},
            "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
        }
    )  # fmt: skip


@pytest.mark.parametrize(("overlap", "gains"), [(0.0, False), (0.9, True)])
def test_a_plan_says_where_halves_pay(overlap: float, gains: bool) -> None:
    spec = on_four_gpus(4)
    machine = machine_for(spec.resources, "bf16")
    notes = plan(spec, replace(machine, profile=replace(machine.profile, overlap=overlap))).notes
    said = [note for note in notes if "split_micro_batch=true would take" in note]
    assert len(said) == gains
    pipelined = spec.with_parallelism(pipeline_parallel_size=2)  # whose stages take whole micro-batches
    notes = plan(pipelined, replace(machine, profile=replace(machine.profile, overlap=overlap))).notes
    assert not any("split_micro_batch" in note for note in notes)


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("latent", 2)])
def test_halves_that_are_recomputed_add_every_weight_gradient_twice(mode: RecomputeMode, times: int) -> None:
    spec = on_four_gpus(1)
    whole, halves = (
        block_work(spec.with_parallelism(split_micro_batch=split), mode).weight_gradients for split in (False, True)
    )
    in_matrices = block_matrix_parameters(spec.model) // 4
    assert halves == replace(whole, moved_bytes=whole.moved_bytes + (times - 1) * (2 + 8) * in_matrices)


def test_what_has_no_choice_is_planned_without_one() -> None:
    dense = job(**{name: dict(section) for name, section in (LONG | {"model": {"family": "dense"}}).items()})
    context = plan(dense).shapes[0].context
    assert context is not None
    assert [each.exchange for each in context.exchanges] == ["keys"]
    assert plan(job()).shapes[0].context is None


def test_state_in_the_hosts_memory_makes_room_and_its_copies_take_time() -> None:
    without, half, whole = (
        plan(job(parallelism={"optimizer_offload": share, "data_parallel_size": 2}, elasticity=ELASTIC))
        for share in (0, 0.5, 1)
    )
    for index, (none, some, most) in enumerate(zip(without.shapes, half.shapes, whole.shapes, strict=True)):
        buffers = 2 * 12 * (1 << 22)
        state = none.memory.optimizer
        if none.data_parallel_size > 1:
            state -= none.memory.weights // none.data_parallel_size  # rounded copies stay
        assert none.memory.host == none.offload_seconds == 0
        assert most.memory.host == state
        assert none.memory.total - most.memory.total == state - buffers, index
        assert most.offload_seconds == pytest.approx(2 * state / 25.6e9)  # PCIe 4 at 80 %
        assert most.step_seconds == pytest.approx(none.step_seconds + most.offload_seconds)
        assert some.offload_seconds == pytest.approx(most.offload_seconds / 2, rel=1e-3)
        # Four copies of what a rank keeps, of which the masters and moments are all.
        assert most.memory.copies == none.memory.copies == (4 if none.world_size > 1 else 2) * state
        assert most.node_host_bytes == min(8, most.world_size) * (most.memory.host + most.memory.copies)
    assert any("which costs" in note and "state and activations" in note for note in half.notes)
    assert not any("masters and moments" in note for note in without.notes)
    assert any("the memory of the nodes is unknown and not checked" in note for note in without.notes)
    fewer = plan(job(parallelism={"optimizer_offload": 1}, fault_tolerance={"memory_copy_every_steps": None})).shapes[0]
    assert fewer.memory.copies == fewer.memory.host


def test_layouts_that_nodes_have_no_memory_for_do_not_fit() -> None:
    spec = job(elasticity=ELASTIC)
    unknown = plan(spec)
    assert {each.fits_host for each in unknown.shapes} == {None}
    sizes = sorted({each.node_host_bytes for each in unknown.shapes})
    assert unknown.fastest is not None
    some = plan(spec, Basis(node_memory_bytes=sizes[0]).machine(spec))
    assert [each.fits_host for each in some.shapes] == [each.node_host_bytes == sizes[0] for each in some.shapes]
    assert some.fastest is not None
    assert some.shapes[some.fastest].fits_host
    (note,) = [note for note in some.notes if "more host memory" in note]
    assert "set fault_tolerance.memory_copy_every_steps=null, which leaves a quarter of the copies" in note
    least = next(each for each in unknown.shapes if each.node_host_bytes == sizes[0])
    none = Basis(node_memory_bytes=sizes[0] - 1).machine(spec)
    assert plan(spec, none).fastest is None
    problem = nothing_fits(spec, none)
    assert problem is not None
    assert problem.startswith(f"no layout fits the nodes: {Layout.of(least)} needs the least, ")
    without = job(elasticity=ELASTIC, fault_tolerance={"memory_copy_every_steps": None})
    assert nothing_fits(without, none) is None
    on_cpus = job(elasticity=ELASTIC, resources={"gpus_per_worker": 0, "accelerator_type": None})
    assert plan(on_cpus, Basis(node_memory_bytes=1).machine(on_cpus)).fastest is not None, "what it has it computes in"
