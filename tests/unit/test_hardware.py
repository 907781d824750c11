"""What share of its peak a gang uses, and of which device's; and what a machine needs to use it."""

import re
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from boost_core.architecture import FlopRates, block_flops_per_token
from boost_core.config import JobSpec
from boost_core.config.parallelism import Layout
from boost_core.context.selection import ContextPlanner
from boost_core.hardware import DEVICES, LINKS, device_named, lacks_compiler, memory_named, peak_flops_per_second
from boost_core.plan.machine import lacks_precision
from boost_core.plan.report import network_in_words
from boost_core.plan.resolve import NothingFits, choose_layouts
from boost_core.plan.search import PlanSearch, search, search_report
from tests.service.records import PROFILE, a_spec


@pytest.mark.parametrize(("device", "bf16", "fp32"), [
    ("NVIDIA A100-SXM4-80GB", 312, 19.5),
    ("NVIDIA A100 80GB PCIe", 312, 19.5),
    ("NVIDIA H100 80GB HBM3", 989, 67),
    ("NVIDIA H100 PCIe", 756.5, 51),
    ("NVIDIA H100 NVL", 835.5, 60),
    ("NVIDIA H200", 989, 67),
    ("NVIDIA H200 NVL", 835.5, 60),
    ("NVIDIA B200", 2250, 75),
    ("NVIDIA GB200", 2500, 80),
    ("NVIDIA A10", 125, 31.2),
    ("NVIDIA L4", 121, 30.3),
    ("NVIDIA L40", 181, 90.5),
    ("NVIDIA RTX A6000", 154.8, 38.7),
    ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    ("Tesla V100-SXM2-32GB", 15.7, 15.7),
])  # fmt: skip
def test_a_device_is_known_by_cudas_name_of_it(device: str, bf16: float, fp32: float) -> None:
    assert peak_flops_per_second(device, "bf16") == bf16 * 1e12
    assert peak_flops_per_second(device, "fp32") == fp32 * 1e12
    # Tensor cores are twice as fast in 8 bits as in 16, where they have them; sheets round each to whole numbers.
    fp8 = peak_flops_per_second(device, "fp8")
    has_fp8 = not any(each in device for each in ("A100", "A10", "A6000", "V100"))
    assert fp8 == pytest.approx((2 if has_fp8 else 1) * bf16 * 1e12, rel=2e-3)


@pytest.mark.parametrize(("kind", "gigabytes", "terabytes", "link"), [
    ("A100-40G", 40, 1.555, "nvlink-a100"), ("A100", 80, 2.039, "nvlink-a100"), ("A100-PCIE-80G", 80, 1.935, "pcie-4"),
    ("H100-NVL", 94, 3.9, "pcie-5"), ("H100-PCIE", 80, 2.0, "pcie-5"),
    ("NVIDIA-H100-80GB-HBM3", 80, 3.35, "nvlink-h200"), ("B200", 180, 8.0, "nvlink-b200"),
    ("L40S", 45, 0.864, "pcie-4"), ("RTX-4090", 24, 1.008, "pcie-4-host"),
    ("V100", 32, 0.9, "nvlink-v100"), ("Tesla-V100-SXM2-16GB", 16, 0.9, "nvlink-v100"),
    ("rtx-3090", 24, 0.936, "pcie-4-host"), ("T4", 15, 0.32, "pcie-3"),
    ("NVIDIA-A100-40G", 40, 1.555, "nvlink-a100"), ("NVIDIA-A100-80G", 80, 2.039, "nvlink-a100"),
    ("NVIDIA_H100_80GB_HBM3", 80, 3.35, "nvlink-h200"), ("A100 40 GB", 40, 1.555, "nvlink-a100"),
    ("A100-40", 40, 1.555, "nvlink-a100"), ("V100-16", 16, 0.9, "nvlink-v100"), ("A100-PCIE-40", 40, 1.555, "pcie-4"),
    ("H100-80", 80, 3.35, "nvlink-h200"), ("L4-24", 22, 0.3, "pcie-4"),
    ("H100NVL", 94, 3.9, "pcie-5"), ("rtx4090", 24, 1.008, "pcie-4-host"), ("RTX6000 Ada", 48, 0.96, "pcie-4"),
    ("NVIDIA RTXA6000", 48, 0.768, "pcie-4"), ("a100pcie40g", 40, 1.555, "pcie-4"),
    ("H100PCIE80GB", 80, 2.0, "pcie-5"), ("A100SXM440GB", 40, 1.555, "nvlink-a100"), ("NVIDIA-A10G", 22, 0.6, "pcie-4"),
    ("L4-24GB", 22, 0.3, "pcie-4"), ("L40-48G", 45, 0.864, "pcie-4"), ("NVIDIA GH200 480GB", 96, 4.0, "nvlink-h200"),
])  # fmt: skip
def test_each_kind_has_its_own_memory_and_links(kind: str, gigabytes: int, terabytes: float, link: str) -> None:
    device = device_named(kind)
    assert device is not None
    assert memory_named(kind) == gigabytes * 10**9
    assert (device.bandwidth, device.link) == (terabytes * 1e12, link)


def test_every_name_leads_to_its_device() -> None:
    for device in DEVICES:
        assert device.link in LINKS
        assert device.memory
        for name, size in device.memory.items():
            assert device_named(name) is device
            assert memory_named(name) == size


@pytest.mark.full
@pytest.mark.parametrize(("kind", "nearest"), [
    ("H10", "H100"), ("H100-40G", "H100"), ("H100-64G", "H100"), ("A100-20G", "A100-40G"), ("A100-48G", "A100-40G"),
    ("H100-94", "H100-NVL"), ("L4-40", "L40"),
    ("NVIDIA-A100-SXM-64GB", "A100"), ("H200-40G", "H200"), ("L40-40GB", "L40"), ("H100-96GB", "H100, H100-"),
])  # fmt: skip
def test_an_unknown_kind_is_refused_with_the_nearest_names(kind: str, nearest: str) -> None:
    assert device_named(kind) is None and memory_named(kind) is None
    small = {"accelerator_type": kind, "gpus_per_worker": 1}
    spec = a_spec(resources=small)
    with pytest.raises(ValueError, match=rf"'{kind}' \(the nearest: .*{nearest}.*\); name one of A10, .*, or describe"):
        search_report(spec, PlanSearch(gpus=8))
    described = {
        "levels": [{"name": "node", "fan_out": 8, "gigabytes_per_second": 50}],
        "device": {"name": "mine", "memory_gigabytes": 48, "teraflops": 200, "terabytes_per_second": 1},
    }
    request = PlanSearch.model_validate({"gpus": 8, "cluster": described})
    report = search_report(spec, request)
    assert report.device_memory_bytes == 48 * 10**9
    machine = request.machine(spec)
    assert 100e12 < machine.profile.product_flops < 200e12


@pytest.mark.full
def test_a_large_model_does_not_fit_cards_for_desks() -> None:
    training = {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 4, "steps": 10}
    spec = a_spec(
        model={"preset": "3b", "vocab_size": 32_000, "family": "cola"}, training=training | {"precision": "bf16"},
        resources={"gpus_per_worker": 1, "accelerator_type": "RTX-4090"},
    )  # fmt: skip
    choices = search_report(spec, PlanSearch(gpus=8)).choices
    assert all(choice.memory_bytes <= 24e9 for choice in choices)
    # Near-ties go to the simplest layout: here the fastest has a schedule of two stages a rank, and a cut of its own.
    fastest = min(choices, key=lambda choice: choice.step_seconds)
    assert ", layers " in fastest.text
    assert ", layers " not in choices[0].text
    assert fastest.step_seconds < choices[0].step_seconds <= 1.05 * fastest.step_seconds


@pytest.mark.full
def test_the_first_choice_does_not_depend_on_how_many_are_shown() -> None:
    training = {"sequence_length": 4096, "global_batch_size": 64, "micro_batch_size": 1, "steps": 10}
    spec = a_spec(
        model={"preset": "7b"}, training=training | {"precision": "bf16"},
        resources={"gpus_per_worker": 1, "accelerator_type": "A100-40G"},
    )  # fmt: skip
    shown = [search_report(spec, PlanSearch(gpus=8, top=top)).choices for top in (1, 5, 30)]
    assert [len(choices) for choices in shown] == [1, 5, 30]
    assert len({choices[0].text for choices in shown}) == 1


@pytest.mark.parametrize("kind", ["V100", "T4", "Tesla-V100-SXM2-16GB"])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_kinds_before_ampere_train_in_fp32_alone(kind: str, precision: str) -> None:
    """Attention in bf16 would keep all scores there, and context parallel ranks have no kernel at all."""

    def of(precision: str, kind: str, **changes: Any) -> JobSpec:
        resources = {"accelerator_type": kind, "gpus_per_worker": 1}
        training: dict[str, Any] = {"steps": 10, "sequence_length": 128, "global_batch_size": 8, "micro_batch_size": 1}
        training["precision"] = precision
        return a_spec(model={"preset": "60m"}, resources=resources, training=training, parallelism={}, **changes)

    spec, said = of(precision, kind), rf"training.precision={precision}: {kind} GPUs have neither bf16 nor flash"
    with pytest.raises(ValueError, match=said):
        search_report(spec, PlanSearch(gpus=2))
    with pytest.raises(ValueError, match=said):
        choose_layouts(of(precision, kind, elasticity={"layouts": "auto", "gpus": {"min": 1, "max": 2}}))
    assert re.match(said, lacks_precision(spec) or "")
    for fits in (of("fp32", kind), of(precision, "H100")):
        assert lacks_precision(fits) is None and search_report(fits, PlanSearch(gpus=2)).choices


@pytest.mark.parametrize(("kind", "has_it"), [
    ("A100", False), ("A10", False), ("RTX-3090", False), ("L4", True), ("RTX-4090", True), ("H100", True),
])  # fmt: skip
def test_kinds_before_ada_are_refused_in_fp8(kind: str, has_it: bool) -> None:
    fields = {"model": {"preset": "60m"}, "parallelism": {}, "training": {"steps": 10, "precision": "fp8"}}
    spec = a_spec(**fields, resources={"accelerator_type": kind, "gpus_per_worker": 1})
    unnamed = a_spec(**fields, resources={"gpus_per_worker": 1})
    measured = PROFILE.model_copy(update={"device": f"NVIDIA {kind}"})
    for job, profile in ((spec, None), (spec, measured), (unnamed, measured)):
        refused = pytest.raises(ValueError, match=rf"fp8: .*{kind} GPUs have no 8-bit products.*8\.9.*; use bf16")
        with nullcontext() if has_it else refused:
            assert search_report(job, PlanSearch(gpus=2, profile=profile)).choices


@pytest.mark.parametrize(("kind", "joined"), [
    ("GB200", "4 in a node at 720 .*, 18 in a rack at 720 .*, the fabric at 40 "), ("H100", "8 in a node at 360 "),
    ("GH200", "1 in a node, the fabric at 40 "),
])  # fmt: skip
def test_tensor_parallel_ranks_stay_in_a_node_of_the_kind(kind: str, joined: str) -> None:
    training = {"steps": 10, "sequence_length": 512, "global_batch_size": 1, "micro_batch_size": 1, "precision": "bf16"}
    spec = a_spec(
        model={"preset": "7b"}, parallelism={}, training=training,
        resources={"gpus_per_worker": 1, "accelerator_type": kind},
        elasticity={"layouts": "auto", "gpus": {"min": 8, "max": 8}},
    )  # fmt: skip
    machine, largest = PlanSearch(gpus=16).machine(spec), int(joined[0])
    assert re.match(f"network: {joined}", network_in_words(machine))
    assert max(choice.layout.tp for choice in search(spec, 16, machine, top=100).choices) == largest
    with nullcontext() if largest == 8 else pytest.raises(NothingFits):  # one sequence is for tp 8 alone
        assert choose_layouts(spec).layouts[0].tensor_parallel_size == 8
    if kind == "GB200":  # keys of a group in a rack
        at = spec.at(Layout(4, 1, 1, cp=4)).model_copy(update={"elasticity": None})
        rates = ContextPlanner.of(at, machine).rates
        assert rates.fabric_bytes == rates.node_bytes == machine.cluster.levels[1].link.bytes_per_second
    slower = machine.joined_at(100).cluster.levels
    assert [level.link for level in slower[:-1]] == [level.link for level in machine.cluster.levels[:-1]]
    assert slower[-1].link.bytes_per_second == 0.8 * 12.5e9


def test_a_kind_without_figures_is_planned_by_its_measured_profile() -> None:
    spec = a_spec(
        resources={"gpus_per_worker": 1, "accelerator_type": "H20"}, training={"steps": 10, "precision": "bf16"}
    )
    report = search_report(spec, PlanSearch(gpus=1, profile=PROFILE.model_copy(update={"device": "NVIDIA H20"})))
    assert report.provenance == "measured"


def test_the_network_is_what_the_kind_usually_has_or_what_is_asked_for() -> None:
    spec = a_spec(resources={"gpus_per_worker": 1, "accelerator_type": "H100"})
    by_default, asked = PlanSearch(gpus=16).machine(spec), PlanSearch(gpus=16, network_gigabits=100).machine(spec)
    assert by_default.cluster.levels[1].link == LINKS["fabric-400g"]
    assert asked.cluster.levels[1].link.bytes_per_second == 0.8 * 12.5e9
    assert "400 Gb/s adapter" in network_in_words(by_default)
    assert "100 Gb/s adapter" in network_in_words(asked)


@pytest.mark.parametrize("device", [
    "cpu", "NVIDIA GeForce RTX 3060", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100 64 GB", "", "GRID A100-10C",
    "NVIDIA A10-8Q", "NVIDIA-A40-12Q", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX A6000 with Max-Q Design",
])  # fmt: skip
def test_of_others_nothing_is_claimed(device: str) -> None:
    assert device_named(device) is None
    rates = FlopRates.of(a_spec(), device)
    assert rates.utilization(1e6, rates.model) is None


def test_a_machine_without_a_compiler_for_triton_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(name: str) -> None:
        (tmp_path / name).touch(mode=0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "Python.h").touch()
    lacks = lacks_compiler()
    assert lacks is not None and "no C compiler" in lacks and "install gcc" in lacks and "\n" not in lacks
    program("clang")
    assert lacks_compiler() is None
    monkeypatch.setenv("CC", "icx")
    assert "icx, which CC names" in (lacks_compiler() or "")
    program("icx")
    assert lacks_compiler() is None
    (tmp_path / "Python.h").unlink()
    assert "no headers of Python" in (lacks_compiler() or "")


@pytest.mark.parametrize(("recompute", "more"), [("none", 0), ("latent", 1 / 6), ("full", 1 / 3)])
def test_hardware_does_what_is_recomputed_too(recompute: str, more: float) -> None:
    spec = a_spec(parallelism={"tensor_parallel_size": 2, "recompute": recompute})
    rates = FlopRates.of(spec, "NVIDIA H200")
    blocks = spec.model.num_hidden_layers * block_flops_per_token(spec.model, spec.training.sequence_length)
    assert rates.hardware - rates.model == pytest.approx(more * blocks)
    assert rates.peak == 2 * 67e12
    assert rates.utilization(1e6, rates.model) == pytest.approx(1e6 * rates.model / (2 * 67e12))


def test_gates_of_crossing_latents_count_on_every_rank() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "rank": 16}
    models = ({**sizes, "family": "lax", "lax": {"gate": gate}} for gate in ("identity", "dense", "tensor"))
    plain, dense, tensor = (FlopRates.of(a_spec(model=model, parallelism={"tensor_parallel_size": 2}), "cpu")
                            for model in models)  # fmt: skip
    vectors = 6 * 2 * 7 * 16  # forward and backward, of the seven latents that cross into each of two blocks
    assert dense.model - plain.model == vectors * 16
    assert tensor.model - plain.model == vectors * (4 + 4)
    assert dense.hardware - plain.hardware == 2 * (dense.model - plain.model)


def test_vanilla_computes_the_attention_of_all_heads_on_every_rank() -> None:
    def of(strategy: str) -> FlopRates:
        return FlopRates.of(a_spec(parallelism={"tensor_parallel_size": 2, "strategy": strategy}), "NVIDIA H200")

    spec = a_spec()
    attention = 12 * spec.model.num_hidden_layers * spec.model.hidden_size * spec.training.sequence_length
    assert of("vanilla").model == of("btp").model == of("btp").hardware
    assert of("vanilla").hardware - of("vanilla").model == attention


@pytest.mark.full
def test_a_search_says_how_many_gpus_would_do_and_why_some_are_not_used() -> None:
    training = {"sequence_length": 4096, "micro_batch_size": 1, "steps": 1000, "precision": "bf16"}
    large = a_spec(
        model={"preset": "7b", "vocab_size": 32_000, "family": "dense"}, training=training | {"global_batch_size": 64},
        resources={"gpus_per_worker": 1, "accelerator_type": "RTX-4090"},
    )  # fmt: skip
    report = search_report(large, PlanSearch(gpus=2))
    assert not report.choices
    assert any(" GPUs would do: tp " in why for why in report.why)
    odd = a_spec(
        model={"preset": "1b", "vocab_size": 32_000, "family": "cola"}, training=training | {"global_batch_size": 15},
        resources={"gpus_per_worker": 1, "accelerator_type": "H100"}, parallelism={},
    )  # fmt: skip
    report = search_report(odd, PlanSearch(gpus=4))
    assert report.choices[0].world_size == 3
    longer = min(each.step_seconds for each in report.choices if each.world_size == 4) / report.choices[0].step_seconds
    assert (
        f"3 of 4 GPUs are used: with 4, tp 1 × pp 4 × dp 1, a step takes {longer - 1:.1%} longer; "
        "15 sequences per step do not divide among 4 replicas, but among 1, 3, 5, here of 1 GPU each"
    ) in report.why
    assert report.choices[0].total_seconds == pytest.approx(1000 * report.choices[0].step_seconds)
    assert report.choices[0].gpu_hours == pytest.approx(3 * report.choices[0].total_seconds / 3600)
    indivisible = odd.model_copy(update={"training": odd.training.model_copy(update={"global_batch_size": 22})})
    report = search_report(indivisible, PlanSearch(gpus=8))
    # Of eight stages, which are about as fast.
    assert any(why.startswith("7 of 8 GPUs are used: with 8 a step takes 2.1% less, too") for why in report.why)
    assert report.choices[0].kilowatt_hours == pytest.approx(0.7 * report.choices[0].gpu_hours)  # 700 W each
    divisible = odd.model_copy(update={"training": odd.training.model_copy(update={"global_batch_size": 16})})
    report = search_report(divisible, PlanSearch(gpus=16, network_gigabits=0.1))
    used = "8 of 16 GPUs are used: layouts with more take longer; 16 sequences per step divide among 4, 8, 16 replicas"
    assert any(why.startswith(used) and why.endswith(", here of 1 GPU each") for why in report.why), report.why
    warm_up = {"global_batch_size": 16, "batch_size_warmup": ({"until_step": 10, "global_batch_size": 6},)}
    grows = a_spec(
        model={"preset": "1b", "vocab_size": 32_000, "family": "cola"}, training=training | warm_up,
        resources={"gpus_per_worker": 1, "accelerator_type": "H100"}, parallelism={},
    )  # fmt: skip
    assert any(
        "2 sequences, the greatest common divisor of all batch sizes, do not divide among 4 replicas, but" in why
        for why in search_report(grows, PlanSearch(gpus=4)).why
    )


def test_a_search_says_why_there_are_no_tensor_parallel_ranks() -> None:
    training = {"sequence_length": 512, "micro_batch_size": 1, "steps": 10, "precision": "bf16", "global_batch_size": 2}
    gpu = {"gpus_per_worker": 1, "accelerator_type": "H100"}
    for size, ruled_out in ((5461, True), (5462, False)):
        model = {"preset": "1b", "vocab_size": 32_000, "family": "dense", "intermediate_size": size}
        report = search_report(
            a_spec(model=model, training=training, resources=gpu, parallelism={}), PlanSearch(gpus=8)
        )
        why = "tensor parallelism is ruled out: 2 does not divide model.intermediate_size=5461; use 1, or round up to "
        assert (f"{why}model.intermediate_size=5462" in report.why) == ruled_out
