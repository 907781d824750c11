"""What share of its peak a gang uses, and of which device's; and what a machine needs to use it."""

import sysconfig
from pathlib import Path

import pytest

from boost_core.hardware import device_named, peak_flops_per_second
from boost_core.kernels.launch import lacks_compiler
from boost_core.plan.work import FlopRates, block_flops_per_token
from tests.service.records import a_spec


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
])  # fmt: skip
def test_a_device_is_known_by_cudas_name_of_it(device: str, bf16: float, fp32: float) -> None:
    assert peak_flops_per_second(device, "bf16") == bf16 * 1e12
    assert peak_flops_per_second(device, "fp32") == fp32 * 1e12
    # Tensor cores are twice as fast in 8 bits as in 16, where they have them; sheets round each to whole numbers.
    fp8 = peak_flops_per_second(device, "fp8")
    assert fp8 == pytest.approx((1 if "A100" in device else 2) * bf16 * 1e12, rel=2e-3)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA GeForce RTX 3060", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
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


def test_vanilla_computes_the_attention_of_all_heads_on_every_rank() -> None:
    def of(strategy: str) -> FlopRates:
        return FlopRates.of(a_spec(parallelism={"tensor_parallel_size": 2, "strategy": strategy}), "NVIDIA H200")

    spec = a_spec()
    attention = 12 * spec.model.num_hidden_layers * spec.model.hidden_size * spec.training.sequence_length
    assert of("vanilla").model == of("btp").model == of("btp").hardware
    assert of("vanilla").hardware - of("vanilla").model == attention
