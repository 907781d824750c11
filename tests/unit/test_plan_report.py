from typing import Any

import pytest
from pydantic import ValidationError

from boost_core.config import JobSpec
from boost_core.config.layout import Layout
from boost_core.hardware import DEVICE_BYTES
from boost_core.plan.flops import model_flops_per_token
from boost_core.plan.memory import rank_memory
from boost_core.plan.report import Plan, plan, presets
from boost_core.plan.resize import fastest
from boost_core.plan.throughput import step_seconds


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
    assert layout.memory.model_dump() == vars(rank_memory(spec, Layout(4, 1, 1)))
    # 4 exchanges forward and backward in 32 blocks; 7r and, forward, two statistics.
    assert layout.communication.all_reduces == 32 * 8
    assert layout.communication.elements_per_token == 32 * (2 * 7 * 1024 + 2)
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


def test_the_fastest_is_the_schedulers_choice_among_those_that_fit() -> None:
    spec = job(elasticity=ELASTIC)
    planned = plan(spec)
    fits = [bool(layout.fits_device) for layout in planned.shapes]
    assert True in fits
    assert False in fits
    fitting = [layout for layout, is_fit in zip(spec.layouts(), fits, strict=True) if is_fit]
    assert planned.fastest is not None
    assert spec.layouts()[planned.fastest] == fastest(spec, fitting)
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
        "tensor_parallel_size", "pipeline_parallel_size", "micro_batch_size=4", "recompute=latent or full",
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
        ({"accelerator_type": "L4"}, None),
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
    asks = any("accelerator_type" in note and all(kind in note for kind in DEVICE_BYTES) for note in planned.notes)
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
