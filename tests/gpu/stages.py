"""The stages, each the cases of one question: ``python -m tests.gpu.stages STAGE --messages FD [--cases NAME …]``.

Without a GPU they run at a tiny shape, which shows that they run and nothing more. With ``--no-values`` the GPU may be
the tests' mock (``tests.mock_gpu``): memory and launches are real there, numbers are not, and what a stage finds out
from numbers is left out.
"""

import argparse
import gc
import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.bench import rank
from boost_core.bench.rank import LoneCommunicator, RunShape, draw_weights
from boost_core.bench.results import Environment
from boost_core.config import JobSpec, ModelConfig
from boost_core.kernels.fp8_product import unavailable
from boost_core.kernels.launch import Implementation, always
from boost_core.messages import ValidationLoss
from boost_core.optim import zero
from boost_core.plan.memory import rank_memory
from boost_core.train import loop
from boost_core.train.state import TrainState
from boost_core.train.step import losses
from tests.benchmarks.kernels import (
    AWKWARD,
    Draw,
    Sizes,
    cases,
    disagreements,
    kernel_rows,
    memory_bandwidth,
)
from tests.benchmarks.rank import VARIANTS, Variant, matrix_rate, rank_rows
from tests.gpu import published
from tests.gpu.__main__ import SPOILED

Figures = Iterator[tuple[str, object, str]]  # quantity, value, unit
Cases = Mapping[str, Callable[[], Figures]]


@dataclass(frozen=True)
class Setting:
    """What stages depend on beside the device.

    Attributes:
        kit: The folder that has been prepared, with a corpus and the curves of a CPU.
        values: Whether the device computes, so that numbers are compared and judged.
    """

    kit: Path
    values: bool


ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
_VARIANTS = (*VARIANTS, published.PUBLISHED)
ONE_GPU = ("dense", "svd", "cola", "lax")  # families at 1B
ORDER_7B = (
    "cola, btp", "cola, as its 7B config", "cola, vanilla", "dense, fullrank", "cola, btp, fp8",
    "cola, btp, recompute latent",
)  # fmt: skip
STEPS = 40  # of the curves
# Rounding to bf16 goes another way on another device: twice as far from fp32 is still that, a fault is orders beyond.
CURVE_FACTOR = 2.0


def main() -> int:
    """Run a stage's cases, and send a message for each figure."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.stages")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--messages", type=int, required=True, help="file descriptor")
    parser.add_argument("--cases", nargs="*", help="default: all")
    parser.add_argument("--kit", type=Path, required=True, help="where corpus and curves of a CPU are")
    parser.add_argument(
        "--no-values", action="store_true", help="the GPU computes nothing: compare and judge no numbers"
    )
    options = parser.parse_args()
    if options.no_values:
        use_mock()
    cases = STAGES[options.stage](Setting(options.kit, not options.no_values))
    with os.fdopen(options.messages, "w") as pipe:
        return run_cases(cases, options.cases, partial(_send, pipe), computes=not options.no_values)


def use_mock() -> None:
    """Take the mock for a GPU that computes: it does copies and no arithmetic, so that no loss is a reason to stop."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it has no cuDNN
    zero.adds_products = lambda device, dtype: dtype in (torch.bfloat16, torch.float16)  # it would compare numbers
    step = rank.training_step
    rank.training_step = lambda *arguments: replace(step(*arguments), diverged=False)
    published.math = SimpleNamespace(isfinite=lambda loss: True)
    evaluated = loop.evaluate

    def evaluate(*arguments: Any) -> ValidationLoss:
        with suppress(ZeroDivisionError):  # it has counted no tokens
            evaluated(*arguments)
        return ValidationLoss(loss=0.0, tokens=0, bits_per_byte=None)

    loop.evaluate = evaluate


def _send(pipe: Any, **message: object) -> None:
    print(json.dumps(message), file=pipe, flush=True)


def run_cases(stage: Cases, wanted: Sequence[str] | None, send: Callable[..., None], computes: bool) -> int:
    """Run cases of a stage.

    Args:
        stage: All of them.
        wanted: The names of those to run; all if there are none.
        send: Takes messages.
        computes: Whether a GPU, if there is one, does; figures of one that does not are never shown as a GPU's.

    Returns:
        0, or ``SPOILED`` after a failure that leaves the device unusable.
    """
    names = list(wanted or stage)
    found = Environment.of(DEVICE)
    versions = (
        f"torch {found.torch_version}, Triton {found.triton_version or 'none'}, Python {platform.python_version()}"
    )
    environment = {"gpu": ON_GPU and computes, "device": found.device, "commit": found.commit, "versions": versions}
    send(cases=names, environment=environment)
    for name in names:
        send(begin=name)
        began = time.monotonic()
        try:
            for figure in stage[name]():
                send(figure=figure)
        except Exception as error:
            traceback.print_exc()
            send(figure=("failed", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}", ""))
            try:
                torch.cuda.synchronize() if ON_GPU else None
            except RuntimeError:
                return SPOILED
        gc.collect()
        send(say=f"  {name}: {time.monotonic() - began:.1f} s")
    return 0


def smoke(setting: Setting) -> Cases:
    """What the device is, its two ceilings, and each kernel against its float64 reference on awkward sizes."""

    def facts() -> Figures:
        if ON_GPU:
            yield "memory", torch.cuda.get_device_properties(0).total_memory / 2**30, "GiB"
            yield "driver", _smi("driver_version,clocks.max.sm,power.limit"), ""
        if setting.values:
            yield "bf16 matrix product", matrix_rate(torch.bfloat16, DEVICE) / 1e12, "TFLOP/s"
            yield "copy", memory_bandwidth(DEVICE) / 1e9, "GB/s"

    def check(dtype: torch.dtype, sizes: Sizes) -> Figures:
        checked = wrong = 0
        for case in cases(sizes, Draw(dtype, DEVICE)):
            checked += 1
            problems = disagreements(case, _kernels())
            if setting.values:
                wrong += len(problems)
                yield from (("disagrees", problem, "") for problem in problems)
        yield "operations checked" if setting.values else "operations launched", checked, ""
        if setting.values:
            yield "disagreements", wrong, ""

    checks = {
        f"kernels, {str(dtype).removeprefix('torch.')}, sizes {index}": partial(check, dtype, sizes)
        for index, sizes in enumerate(AWKWARD)
        for dtype in (torch.float32, torch.bfloat16)
    }
    return {"facts": facts, **checks}


def single(setting: Setting) -> Cases:
    """BOOST's headline on one GPU: whole steps of a 1B model, dense and low-rank, and the memory that was planned."""
    shape = RunShape("1b", 1, 4, 4096) if ON_GPU else _tiny(1)
    families = [_alone(family, {}) for family in ONE_GPU]
    recomputed = replace(_alone("cola", {"recompute": "latent"}), name="cola, recompute latent")
    return {variant.name: partial(_step, setting, shape, variant, planned=True) for variant in (*families, recomputed)}


def _tiny(ranks: int) -> RunShape:
    return RunShape("tiny", ranks, 1, 64, layers=1, vocab_size=256)


def _alone(family: str, parallelism: Mapping[str, Any]) -> Variant:
    return Variant(family, family, {"strategy": "fullrank" if family == "dense" else "btp", **parallelism})


def rank7b(setting: Setting) -> Cases:
    """One rank's work at 7B, tp 4, without the others: ours beside the published code's step, vanilla and full rank."""
    return _variants(setting, ORDER_7B, (1, 4))


def fp8(setting: Setting) -> Cases:
    """Whether 8-bit products pay, where a step has most tokens."""
    return _variants(setting, ("cola, btp", "cola, btp, fp8"), (8,))


def _variants(setting: Setting, names: Sequence[str], sequences: Sequence[int]) -> Cases:
    wanted = [next(each for each in _VARIANTS if each.name == name) for name in names]
    wanted = [variant for variant in wanted if not (variant.fp8 and unavailable(DEVICE))]
    return {
        f"{variant.name}, × {count}": partial(_step, setting, _shape_7b(count), variant)
        for count in (sequences if ON_GPU and setting.values else sequences[:1])
        for variant in wanted
    }


def _shape_7b(sequences: int) -> RunShape:
    return RunShape("7b", 4, sequences, 4096) if ON_GPU else _tiny(2)


def _step(setting: Setting, shape: RunShape, variant: Variant, planned: bool = False) -> Figures:
    """Figures of a variant's training step."""
    job = variant.job(shape, DEVICE)
    if planned:
        yield "peak memory, planned", rank_memory(job, job.layouts()[0]).total / 2**30, "GiB"
    rate = _rate() if setting.values else 8e14  # kernels that compute nothing take no time
    rows = rank_rows(shape, variant, DEVICE, 10 if ON_GPU and setting.values else 2, rate, ["nvlink-h200"])
    for row in rows:
        scale, unit = {"s": (1e3, "ms"), "bytes": (2**-30, "GiB"), "share": (100.0, "%")}.get(row.unit, (1.0, ""))
        yield row.quantity, row.p50 * scale, unit
        if row.quantity == "step":
            yield "throughput", shape.micro_batch_size * shape.sequence_length / row.p50, "tokens/s"
    if ON_GPU and variant.make_step is rank.step_of:
        captured = any(row.quantity == "step, not captured" for row in rows)
        yield "captured", "yes" if captured else "no, log.txt says why", ""


@cache
def _rate() -> float:
    """The device's matrix rate in FLOPs per second."""
    return matrix_rate(torch.bfloat16, DEVICE)


def _kernels() -> Implementation:
    return "triton" if ON_GPU else "naive"


MODELS: tuple[dict[str, Any], ...] = (
    {"family": "cola"},
    {"family": "cola", "num_key_value_heads": 2},
    {"family": "svd"},
    {"family": "dense"},
    {"family": "lax", "lax": {"base": "cola", "gate": "dense"}},
)
CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "split_micro_batch": True},
    {"tensor_parallel_size": 2, "recompute": "latent"},
    {"tensor_parallel_size": 2, "norm": "online_paper", "recompute": "full"},
    {"tensor_parallel_size": 2, "group_projections": False},
)
MODEL_LIMITS = {"fp32": 2e-4, "bf16": 3e-2}  # relative error of loss and gradients together


def models(setting: Setting) -> Cases:
    """Whole models, loss and gradients of one step: the device's kernels against the references."""
    tokens = torch.randint(0, 1000, (4, 129), generator=torch.Generator().manual_seed(0)).numpy()
    sizes = {
        "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 4, "rank": 96,
        "vocab_size": 1000,
    }  # fmt: skip

    def results(spec: JobSpec, kernels: Implementation) -> torch.Tensor:
        dist.init_process_group("fake", rank=0, world_size=spec.parallelism.world_size, store=FakeStore())
        try:
            with always(kernels):
                state = TrainState.initial(spec, DEVICE, draw_weights, communicator=LoneCommunicator)
                state.gradients.begin()
                loss, _ = losses(state, tokens)
                loss.mean().backward()
                state.gradients.finish()
                return torch.cat(
                    [loss.detach().double(), *(group.own_gradient.double() for group in state.optimizer.groups)]
                )
        finally:
            dist.destroy_process_group()

    def compare(model: Mapping[str, Any]) -> Figures:
        low_rank = model["family"] != "dense"
        for choice in CHOICES:
            if not low_rank and set(choice) - {"tensor_parallel_size"}:
                continue
            strategy = {"strategy": "btp" if low_rank else "fullrank"}
            for precision, limit in MODEL_LIMITS.items() if ON_GPU else (("fp32", 0.0),):
                spec = JobSpec.model_validate(
                    {
                        "name": "check",
                        "model": {name: size for name, size in sizes.items() if low_rank or name != "rank"} | model,
                        "parallelism": strategy | choice,
                        "training": {
                            "steps": 9, "sequence_length": 128, "global_batch_size": 4, "micro_batch_size": 4,
                            "precision": precision,
                        },
                    }
                )  # fmt: skip
                mine, reference = results(spec, _kernels()), results(spec, "naive")
                how = ", ".join(f"{name} {value}" for name, value in choice.items()) or "tp 1"
                if setting.values:
                    error = ((mine - reference).norm() / reference.norm()).item()
                    yield f"{precision}, {how}", error, "" if error <= limit else "WRONG"
                else:
                    yield f"{precision}, {how}", len(mine), "numbers"

    return {", ".join(_plain(model)): partial(compare, model) for model in MODELS}


def _plain(model: Mapping[str, Any]) -> Iterator[str]:
    yield str(model["family"])
    if "num_key_value_heads" in model:
        yield f"{model['num_key_value_heads']} key and value heads"


ON_A_MOCK = """
import runpy
from tests.gpu.stages import use_mock
use_mock()
runpy.run_module("boost_core", run_name="__main__", alter_sys=True)
"""


def train(setting: Setting) -> Cases:
    """Forty steps of a small CoLA in bf16, as CUDA graphs and kernel by kernel, beside the CPU's, which came along."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"gpu-kit-{os.getpid()}"

    def run(graphs: str) -> Figures:
        precision = "bf16" if ON_GPU else "fp32"
        curve = curve_of(DEVICE.type, precision, graphs, setting.kit / "corpus", folder / graphs, setting.values)
        yield "steps", len(curve), ""
        if not setting.values:
            return
        carried = json.loads((setting.kit / "cpu_losses.json").read_text())
        yield "last loss", curve[-1], ""
        yield "losses", [round(loss, 5) for loss in curve], ""
        exact, limit = carried["fp32"], CURVE_FACTOR * largest_difference(carried["bf16"], carried["fp32"])
        off = largest_difference(curve, exact)
        yield "largest difference to fp32 on a CPU", off, "" if off <= limit else "WRONG"
        yield "as bf16 on a CPU differs", limit / CURVE_FACTOR, ""

    ways = {"captured": "on", "not captured": "off"} if ON_GPU else {"not captured": "off"}
    return {name: partial(run, graphs) for name, graphs in ways.items()}


def largest_difference(curve: Sequence[float], exact: Sequence[float]) -> float:
    """Relative to the exact losses; infinite if the curve ended early."""
    if len(curve) != len(exact):
        return float("inf")
    return max(abs(mine - theirs) / theirs for mine, theirs in zip(curve, exact, strict=True))


def curve_of(
    device: str, precision: str, graphs: str, corpus: Path, folder: Path, values: bool = True, stdout: int | None = None
) -> list[float]:
    """Train a small CoLA for forty steps and return its losses; without ``values`` the GPU is one without any.

    Raises:
        subprocess.CalledProcessError: The job failed.
    """
    folder.mkdir(parents=True)
    job, reports = folder / "job.json", folder / "reports.jsonl"
    job.write_text(
        json.dumps(
            {
                "name": "gpu-kit",
                "model": {"preset": "tiny"},
                "data": {"source": {"kind": "tokenized", "paths": [str(corpus)]}},
                "training": {
                    "steps": STEPS, "sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 4,
                    "precision": precision, "cuda_graphs": graphs, "evaluate_every_steps": STEPS,
                },
                "optimizer": {"learning_rate": 0.006, "warmup_steps": 10},
                "resources": {"gpus_per_worker": 1 if device == "cuda" else 0},
                "checkpoint": {"url": str(folder / "checkpoints"), "every_steps": STEPS},
            }
        )
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The only rank is started without torchrun, whose ranks would outlive the end of a case that takes too long.
    rank_of_one = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "gpu-kit",
    }  # fmt: skip
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    start = ["-m", "boost_core"] if values else ["-c", ON_A_MOCK]
    command = [sys.executable, *start, str(job), "--reports", str(reports)]
    subprocess.run(command, env=os.environ | rank_of_one | hidden, check=True, stdout=stdout)
    return [line["loss"] for line in map(json.loads, reports.read_text().splitlines()) if line["kind"] == "progress"]


def profile(_: Setting) -> Cases:
    """Where a rank's step goes: the 30 kernels that take most time, launched one by one."""

    def run(name: str, sequences: int) -> Figures:
        shape, variant = _shape_7b(sequences), next(each for each in _VARIANTS if each.name == name)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        with rank.alone(shape.tensor_parallel_size):
            step, _, graph = variant.step(shape, DEVICE)
            if graph is not None:
                graph.release("it is to be launched kernel by kernel")
            for _ in range(3):
                step()
            with torch.profiler.profile(activities=activities) as profiled:
                step()
        kind = "CUDA" if ON_GPU else "CPU"
        events = [each for each in profiled.key_averages() if each.device_type.name == kind]
        seconds = {each.key: each.self_device_time_total if ON_GPU else each.self_cpu_time_total for each in events}
        yield "kernels' time", sum(seconds.values()) / 1e3, "ms"
        for event in sorted(events, key=lambda each: -seconds[each.key])[:30]:
            yield event.key[:90], f"{seconds[event.key] / 1e3:.3f} ms in {event.count}", ""

    wanted = ("cola, btp", 1), ("cola, as its 7B config", 1), ("cola, btp", 4)
    return {f"{name}, × {sequences}": partial(run, name, sequences) for name, sequences in wanted}


def kernels(setting: Setting) -> Cases:
    """Each kernel against the roofline, plain torch and torch.compile."""
    model = ModelConfig.model_validate({"preset": "7b", "family": "cola", "vocab_size": 32_000})
    sizes = Sizes.of_model(model, 4, 4, 4096) if ON_GPU else AWKWARD[2]
    bandwidth = memory_bandwidth(DEVICE)

    def run(name: str) -> Figures:
        case = next(case for case in cases(sizes, Draw(torch.bfloat16, DEVICE)) if case.name == name)
        for row in kernel_rows(case, DEVICE, bandwidth, 20 if setting.values else 2):
            yield row.quantity, row.p50 * (1e3 if row.unit == "s" else 100), "ms" if row.unit == "s" else "%"

    # By the same device: an A100 has no cases in 8 bits.
    return {case.name: partial(run, case.name) for case in cases(AWKWARD[0], Draw(torch.bfloat16, DEVICE))}


STAGES: Mapping[str, Callable[[], Cases]] = {
    stage.__name__: stage for stage in (smoke, single, rank7b, train, models, profile, kernels, fp8)
}


def _smi(fields: str) -> str:
    """What nvidia-smi says of the first GPU."""
    try:
        return subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"


if __name__ == "__main__":
    sys.exit(main())
