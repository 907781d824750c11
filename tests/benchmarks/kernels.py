"""Every operation of ``boost_core.kernels`` at given sizes, with the bytes that it cannot avoid moving.

Tests compare implementations on these cases at awkward sizes. ``python -m tests.benchmarks.kernels`` times them at
those of a model, against plain torch, ``torch.compile`` and the roofline; it first compares every kernel with its
float64 reference, and times nothing if one is wrong.
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from math import gcd
from pathlib import Path
from typing import NamedTuple

import torch

from boost_core.bench.__main__ import positive, try_to_write
from boost_core.bench.rank import RunShape, Variant
from boost_core.bench.results import FLUSHED_BYTES, NO_GPU, Environment, Row, kernel_seconds, table
from boost_core.config import Activation, ModelConfig
from boost_core.config.base import hear_interrupts, in_lines
from boost_core.config.model import PRESETS
from boost_core.kernels.adamw import AdamWUpdate, adamw_
from boost_core.kernels.cross_entropy import logits_gradient, row_statistics
from boost_core.kernels.fp8_product import quantise_columns, quantise_rows, unavailable
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.latent_epilogue import Epilogue, latent_epilogue
from boost_core.kernels.launch import Implementation, always
from boost_core.kernels.lax_crossing import lax_crossing
from boost_core.kernels.residual_add import residual_add
from boost_core.kernels.rotary import rotary
from boost_core.kernels.scaled_weight import unscale_
from boost_core.kernels.symmetric_sum import Peers, spread_sum, sum_of_latents, symmetric_sum
from boost_core.terminal import columns_here, print_lines

Tensors = tuple[torch.Tensor, ...]
EPSILON = 1e-5
UPDATE = AdamWUpdate(learning_rate=1e-2, betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.1, step=3)


class Sizes(NamedTuple):
    """One rank's sizes.

    Attributes:
        tokens: Tokens of a micro-batch, a multiple of ``positions``.
        positions: Length of a sequence.
        hidden: Hidden size, this rank's shard.
        rank: Width of a latent.
        mlp: MLP size, this rank's shard.
        heads: Query heads of this rank.
        key_value_heads: Its key and value heads.
        head_size: Width of a head.
        vocabulary: Logits per token, this rank's part.
        weights: Elements in one optimizer update.
    """

    tokens: int
    positions: int
    hidden: int
    rank: int
    mlp: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    weights: int

    @classmethod
    def of_model(cls, model: ModelConfig, tensor_parallel_size: int, sequences: int, positions: int) -> "Sizes":
        """Return one rank's sizes under btp; an optimizer update covers one block's largest factor."""
        split = model.hidden_size, model.intermediate_size, model.num_attention_heads, model.key_value_heads
        hidden, mlp, heads, key_heads = (size // tensor_parallel_size for size in split)
        rank, vocabulary = model.bottleneck_rank, model.vocab_size // tensor_parallel_size
        tokens, weights = sequences * positions, model.num_hidden_layers * 2 * mlp * rank
        return cls(tokens, positions, hidden, rank, mlp, heads, key_heads, model.head_size, vocabulary, weights)


# One row; primes; a row that fills its block, and one that needs several blocks.
AWKWARD = [
    # tokens, positions, hidden, rank, mlp, heads, key_value_heads, head_size, vocabulary, weights
    Sizes(1, 1, 1, 3, 1, 1, 1, 2, 1, 1),
    Sizes(6, 3, 7, 5, 13, 3, 1, 6, 11, 97),
    Sizes(4, 2, 64, 16, 32, 4, 2, 8, 128, 1024),
    Sizes(5, 5, 97, 31, 1031, 3, 3, 10, 8209, 1031),
]


class Draw:
    """Random inputs, the same each time on the same device.

    Args:
        dtype: The compute type.
        device: Where they live.

    Attributes:
        device: As given.
        generator: Draws them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, precise: bool = False) -> torch.Tensor:
        """Draw from a standard normal, in the compute type, or in at least fp32."""
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.to(torch.promote_types(self._dtype, torch.float32) if precise else self._dtype)


@dataclass(frozen=True)
class Case:
    """One operation with its inputs.

    Attributes:
        name: The operation and its variant.
        inputs: Its arguments; some operations overwrite them.
        differentiated: Which of the inputs get a gradient; none if the operation has no backward pass.
        run: Calls it.
        forward_bytes: The minimum that a call has to read and write.
        backward_bytes: The minimum that its backward pass has to; 0 if there is none.
    """

    name: str
    inputs: Tensors
    differentiated: tuple[int, ...]
    run: Callable[..., Tensors]
    forward_bytes: int
    backward_bytes: int = 0


def cases(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    """Yield all operations in all variants; of the tensors, only one group's are in memory at a time."""
    inputs: Tensors

    # On the residual and latents.
    x_Td, y_Td = draw.normal(sizes.tokens, sizes.hidden), draw.normal(sizes.tokens, sizes.hidden)

    def add(x_Td: torch.Tensor, y_Td: torch.Tensor | None = None) -> Tensors:
        return tuple(part for part in residual_add(x_Td, y_Td) if isinstance(part, torch.Tensor))

    yield Case("residual_add", (x_Td, y_Td), (0, 1), add, x_Td.nbytes * 3, x_Td.nbytes * 4)
    yield Case("residual_start", (x_Td,), (0,), add, x_Td.nbytes, x_Td.nbytes * 4)

    pieces, width = 3, 4 * sizes.hidden
    h_Tc = draw.normal(sizes.tokens, pieces * sizes.rank)
    squares_T = width * draw.normal(sizes.tokens).square()

    read_and_written = h_Tc.nbytes * 2
    for name, inputs, activation in (
        ("norm", (h_Tc, squares_T), Activation.LINEAR),
        ("norm and SiLU", (h_Tc, squares_T), Activation.SILU),
        ("SiLU", (h_Tc,), Activation.SILU),
    ):
        yield Case(
            f"latent_epilogue, {name}", inputs, tuple(range(len(inputs))),
            lambda h_Tc, s_T=None, activation=activation: (
                latent_epilogue(h_Tc, s_T, pieces, width, EPSILON, activation),
            ),
            read_and_written, h_Tc.nbytes * 3,
        )  # fmt: skip

    count = 2
    h_Tc, crossed_gTr = draw.normal(sizes.tokens, count * sizes.rank), draw.normal(count, sizes.tokens, sizes.rank)
    squares_T = width * draw.normal(sizes.tokens).square()
    scale_gr, shift_gr = draw.normal(count, sizes.rank), draw.normal(count, sizes.rank)

    crossing: Tensors = (h_Tc, crossed_gTr, scale_gr, shift_gr)
    for name, inputs, activation in (
        ("", crossing, Activation.LINEAR),
        (", norm", (*crossing, squares_T), Activation.LINEAR),
        (", norm and SiLU", (*crossing, squares_T), Activation.SILU),
    ):
        yield Case(
            f"lax_crossing{name}", inputs, tuple(range(len(inputs))),
            lambda h_Tc, crossed_gTr, scale_gr, shift_gr, s_T=None, activation=activation: (
                lax_crossing(h_Tc, s_T, width, EPSILON, crossed_gTr, scale_gr, shift_gr, EPSILON, activation),
            ),
            h_Tc.nbytes * 3, h_Tc.nbytes * 5,
        )  # fmt: skip
    del x_Td, y_Td, h_Tc, squares_T, crossed_gTr, scale_gr, shift_gr, crossing, inputs

    # On the MLP, heads and logits.
    both_gTf = draw.normal(2, sizes.tokens, sizes.mlp)
    one_bytes = both_gTf.nbytes // 2
    for name, activation in (("", Activation.LINEAR), (", SiLU", Activation.SILU)):
        for how, parts in (("", (both_gTf,)), (", apart", tuple(torch.split(both_gTf, 1)))):
            yield Case(
                f"gated_product{name}{how}", parts, tuple(range(len(parts))),
                lambda *parts, activation=activation: (gated_product(list(parts), activation),),
                one_bytes * 3, one_bytes * 5,
            )  # fmt: skip

    angles_se = draw.normal(sizes.positions, sizes.head_size // 2, precise=True)
    angles = (angles_se.cos(), angles_se.sin())
    wide, narrow = sizes.heads * sizes.head_size, sizes.key_value_heads * sizes.head_size

    variants = {
        "": (wide, (draw.normal(3, sizes.tokens, wide),)),
        ", grouped-query": (narrow, (draw.normal(1, sizes.tokens, wide), draw.normal(2, sizes.tokens, narrow))),
        ", one by one": (narrow, tuple(draw.normal(1, sizes.tokens, width) for width in (wide, narrow, narrow))),
        ", keys": (narrow, (draw.normal(2, sizes.tokens, narrow),)),
    }
    for name, (key_width, parts) in variants.items():
        inputs, whole = (*angles, *parts), sum(part.nbytes for part in parts)
        turned = whole - sizes.tokens * key_width * parts[0].element_size()
        yield Case(
            f"rotary{name}", inputs, tuple(range(len(angles), len(inputs))),
            lambda cosine_se, sine_se, *parts: rotary(list(parts), cosine_se, sine_se),
            turned * 2, whole * 2,
        )  # fmt: skip

    logits_cV = draw.normal(sizes.tokens, sizes.vocabulary)
    # Half of the targets belong to other ranks, on either side.
    beyond, drawn = sizes.vocabulary // 2, draw.generator
    target_c = torch.randint(-beyond, sizes.vocabulary + beyond, (sizes.tokens,), generator=drawn, device=draw.device)
    log_sum_c = logits_cV.double().logsumexp(dim=-1).to(torch.promote_types(logits_cV.dtype, torch.float32)) + 0.5
    dloss_c, dlog_sum_c = (draw.normal(sizes.tokens, precise=True) for _ in range(2))
    yield Case("cross_entropy, statistics", (logits_cV, target_c), (), row_statistics, logits_cV.nbytes)
    inputs = (logits_cV, target_c, log_sum_c, dloss_c, dlog_sum_c)
    yield Case("cross_entropy, gradient", inputs, (), lambda *inputs: (logits_gradient(*inputs),), logits_cV.nbytes * 2)
    del both_gTf, parts, angles_se, angles, variants, logits_cV, target_c, log_sum_c, dloss_c, dlog_sum_c, inputs

    # On weights and peers' memory.
    master, gradient, first = (draw.normal(sizes.weights, precise=True) for _ in range(3))
    second, weight = draw.normal(sizes.weights, precise=True).square(), draw.normal(sizes.weights)
    clip = torch.full((1,), 0.25, dtype=master.dtype, device=master.device)

    def run(master: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
            clip: torch.Tensor, weight: torch.Tensor | None = None) -> Tensors:  # fmt: skip
        adamw_(master, gradient, first, second, weight, clip, UPDATE)
        return (master, first, second) if weight is None else (master, first, second, weight)

    inputs = (master, gradient, first, second, clip)
    yield Case("adamw", inputs, (), run, master.nbytes * 7)
    yield Case("adamw, rounded", (*inputs, weight), (), run, master.nbytes * 7 + weight.nbytes)

    gradient_dc, dscale_d = draw.normal(sizes.hidden, sizes.mlp, precise=True), draw.normal(sizes.hidden, precise=True)
    weight_dc, scale_d = draw.normal(sizes.hidden, sizes.mlp), draw.normal(sizes.hidden)

    def unscale(begins: bool, blocks: int, *tensors: torch.Tensor) -> Tensors:
        gradient_dc, weight_dc, scale_d, dscale_d = tensors
        norms = torch.empty(blocks, dtype=gradient_dc.dtype, device=gradient_dc.device) if blocks else None
        unscale_(gradient_dc, weight_dc, scale_d, dscale_d, begins, norms)
        return (gradient_dc, dscale_d) if norms is None else (gradient_dc, dscale_d, norms)

    read_and_written, blocks = gradient_dc.nbytes * 2 + weight_dc.nbytes, gradient_dc.numel() // gcd(sizes.mlp, 64)
    for name, begins, with_norm in (("", True, 0), (", added", False, 0), (", norms", False, blocks)):
        tensors = gradient_dc, weight_dc, scale_d, dscale_d
        yield Case(f"unscale{name}", tensors, (), partial(unscale, begins, with_norm), read_and_written)

    x_gTm, weight_grd = draw.normal(2, sizes.tokens, sizes.mlp), draw.normal(3, sizes.rank, sizes.hidden)
    scale_r = draw.normal(sizes.rank)
    if x_gTm.device.type != "cuda" or not unavailable(x_gTm.device):
        yield Case("quantise rows", (x_gTm,), (), lambda x: tuple(quantise_rows(x)), x_gTm.nbytes + x_gTm.numel())
        for name, quantise in (("rows", quantise_rows), ("columns", quantise_columns)):
            yield Case(
                f"quantise a weight's {name}", (weight_grd, scale_r), (),
                lambda weight, factor, quantise=quantise: tuple(quantise(weight, factor)),
                weight_grd.nbytes + weight_grd.numel(),
            )  # fmt: skip

    elements, ranks = sizes.tokens * count * sizes.rank, range(3)
    of_ranks = ((draw.normal(elements), width * draw.normal(sizes.tokens).square()) for _ in ranks)
    sent = tuple(torch.cat(latents_and_squares) for latents_and_squares in of_ranks)

    def summed(*memory: torch.Tensor, computed: Epilogue | None = None, length: int | None = None) -> Tensors:
        out_n = torch.empty_like(memory[0][:length])
        if computed is not None:
            return out_n, sum_of_latents(Peers.of(list(memory)), out_n, computed)
        symmetric_sum(Peers.of(list(memory)), out_n)
        return (out_n,)

    def spread(*memory: torch.Tensor) -> Tensors:
        spread_sum(Peers.of(list(memory)), sizes.rank, len(memory[0]) - 1)
        return memory

    read, one = sum(each.nbytes for each in sent), sent[0].nbytes
    yield Case("symmetric_sum", sent, (), summed, read + one)
    yield Case("symmetric_sum, spread", sent, (), spread, 2 * read)
    for name, statistic, activation in (
        ("norm", True, Activation.LINEAR),
        ("norm and SiLU", True, Activation.SILU),
        ("SiLU", False, Activation.SILU),
    ):
        computed = Epilogue(sizes.tokens, count, statistic, width, EPSILON, activation)
        length = len(sent[0]) - (0 if statistic else sizes.tokens)
        latents = partial(summed, computed=computed, length=length)
        yield Case(f"symmetric_sum, {name}", sent, (), latents, read + 2 * one)


# Each kernel against its reference in plain torch, the reference compiled, and the roofline.


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, counting reads and writes."""
    source = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(kernel_seconds(lambda: target.copy_(source), device, repeats=10))


def kernel_rows(case: Case, device: torch.device, bandwidth: float, repeats: int) -> Iterator[Row]:
    """Time one operation, forward and backward, under each implementation, with the share of the roofline.

    A figure comes as soon as it is known, so that an implementation that fails takes none of those before it along.

    Args:
        case: The operation with its inputs, which it may overwrite.
        device: Where they live. Without a GPU only the reference can be timed.
        bandwidth: The device's measured memory bandwidth in bytes per second.
        repeats: Timed calls.
    """
    ways: list[tuple[str, Implementation]] = [("eager", "naive")]
    if device.type == "cuda":
        ways = [("triton", "triton"), *ways, ("compiled", "naive")]
    for name, implementation in ways:
        run = case.run
        with always(implementation):
            if name == "compiled":
                torch.compiler.reset()
                run = torch.compile(case.run, dynamic=False)
            for direction in ("forward", "backward") if case.differentiated else ("forward",):
                forward = direction == "forward"
                least = case.forward_bytes if forward else case.backward_bytes
                call: Callable[[], object] = partial(run, *case.inputs)
                if not forward:
                    inputs = [each.detach() for each in case.inputs]
                    leaves = [inputs[index].requires_grad_() for index in case.differentiated]
                    outputs = [output for output in run(*inputs) if output.requires_grad]
                    upstream = [torch.ones_like(output) for output in outputs]
                    call = partial(torch.autograd.grad, outputs, leaves, upstream, retain_graph=True, allow_unused=True)
                seconds = Row.of(case.name, f"{direction}, {name}", "s", *kernel_seconds(call, device, repeats))
                yield seconds
                share = least / bandwidth / seconds.p50
                yield Row.of(case.name, f"{direction}, {name}, of roofline", "share", share)


# The gate before every timing: an operation matches the float64 reference within a derived bound.

ROUNDINGS = 4  # of each element on its way through an operation
Arrange = Callable[[torch.Tensor], torch.Tensor]  # the same values in another memory layout


def disagreements(
    case: Case, implementation: Implementation = "triton", arrange: Arrange = torch.Tensor.contiguous
) -> list[str]:
    """Return outputs and gradients that are further from the float64 reference than rounding explains.

    The bound: the relative error of the reference in the same type; the effect of moving the inputs by a few
    roundings of the fp32 arithmetic inside, which is large where terms cancel; and one more rounding of the result.

    Args:
        case: The operation with its inputs, which are left unchanged.
        implementation: The implementation to check.
        arrange: Gives the inputs of the checked implementation a memory layout.
    """
    # Each call gets copies, because operations may overwrite their inputs.
    mine = _results(case, implementation, tuple(arrange(each.clone()) for each in case.inputs))
    same_type = _results(case, "naive", tuple(each.clone() for each in case.inputs))
    exact = [each.double() if each.is_floating_point() else each for each in case.inputs]
    perturbed = list(exact)  # every number up or down by a few fp32 roundings
    for index, values in enumerate(exact):
        if values.is_floating_point():
            count = values.numel()
            signs = torch.linspace(0, count, count, dtype=values.dtype, device=values.device).cos().sign()
            perturbed[index] = values * (1 + ROUNDINGS * torch.finfo(torch.float32).eps * signs.view(values.shape))
    truth = _results(case, "naive", tuple(exact))
    moved = _results(case, "naive", tuple(perturbed))
    problems = []
    for index, (value, reference, true, nearby) in enumerate(zip(mine, same_type, truth, moved, strict=True)):
        right = true.double()  # for 8-bit numbers, which have no arithmetic
        error, *explained = (
            float((each.double() - right).norm() / right.norm()) for each in (value, reference, nearby)
        )
        limit = sum(explained) + torch.finfo(value.dtype).eps
        if not error <= limit:  # NaN is a disagreement, too
            problems.append(f"{case.name}, result {index} of {len(mine)}: relative error {error:.2e} over {limit:.2e}")
    return problems


def _results(case: Case, implementation: Implementation, inputs: Tensors) -> list[torch.Tensor]:
    """Return the outputs, then the gradients for one fixed gradient of each output."""
    leaves = [inputs[index].requires_grad_() for index in case.differentiated]
    with always(implementation):
        outputs = case.run(*inputs)
        results = [output.detach().clone() for output in outputs]
        if leaves:
            # A gradient of the output's type, the same in all types except for rounding, laid out across its rows.
            upstream = []
            for output in outputs:
                count = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
                values = (count * 0.7 + 1).sin().to(torch.bfloat16).to(output.dtype).view(output.shape)
                upstream.append(values.mT.contiguous().mT if values.ndim > 1 else values)
            torch.autograd.backward(list(outputs), upstream)
    return results + [leaf.grad for leaf in leaves if leaf.grad is not None]


def wrong_results(device: torch.device) -> list[str]:
    """Return where the operations, as run by this device, disagree with the reference."""
    implementation: Implementation = "triton" if device.type == "cuda" else "naive"
    return [
        f"{dtype}: {problem}"
        for sizes in AWKWARD
        for dtype in (torch.float32, torch.bfloat16)
        for case in cases(sizes, Draw(dtype, device))
        for problem in disagreements(case, implementation)
    ]


# The command, and what it has in common with ``tests.benchmarks.rank``.

RESULTS = Path(__file__).with_name("results.csv")
PUBLISHED_SIZES = {"1b": 1, "3b": 2, "7b": 4, "13b": 4, "30b": 4}  # of BOOST's systems runs: presets and their tp


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the kernels; returns 0 on success, 1 for wrong results, 2 if it cannot be measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.kernels", description="Time every kernel.")
    parser.add_argument("--model", choices=PRESETS, default="7b")
    parser.add_argument("--tp", type=positive, help="tensor parallel ranks (default: as in BOOST's systems runs)")
    parser.add_argument("--micro-batch", type=positive, default=4)
    add_common(parser)
    return run_checked(parser.parse_args(arguments), _kernels)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that both commands have."""
    parser.add_argument("--sequence", type=positive, default=4096, help="tokens per sequence")
    parser.add_argument("--repeats", type=positive, default=20, help="repetitions of each measurement")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to append to")


def run_checked(options: argparse.Namespace, benchmark: Callable[[argparse.Namespace, torch.device], None]) -> int:
    """Run a benchmark if every kernel's results are right and the file of figures can be written."""
    hear_interrupts()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        try_to_write(options.results)
        if wrong := wrong_results(device):
            print_lines("\n".join(["Nothing was timed, because results are wrong:", *wrong]), to=sys.stderr)
            return 1
        benchmark(options, device)
    except (OSError, ValueError) as error:
        print_lines(in_lines(error), to=sys.stderr)
        return 2
    except FloatingPointError as error:
        print_lines(str(error), to=sys.stderr)
        return 1
    if device.type != "cuda":
        print_lines(NO_GPU)
    return 0


def append(path: Path, benchmark: str, environment: Environment, rows: Iterable[Row]) -> None:
    """Append rows to a file of comma-separated values, with a header if it is new."""
    with path.open("a", newline="", encoding="utf-8") as stream:
        names = [*(field.name for field in fields(Environment)), "benchmark", *(field.name for field in fields(Row))]
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        if not stream.seekable() or not stream.tell():
            writer.writeheader()
        for row in rows:
            figures = {name: f"{value:.6g}" for name, value in asdict(row).items() if isinstance(value, float)}
            writer.writerow(asdict(environment) | {"benchmark": benchmark} | asdict(row) | figures)


def _kernels(options: argparse.Namespace, device: torch.device) -> None:
    tp = options.tp or PUBLISHED_SIZES.get(options.model, 1)
    shape = RunShape(options.model, tp, options.micro_batch, options.sequence)
    model = Variant("cola, btp", "cola", {"strategy": "btp"}).job(shape, device).model
    sizes = Sizes.of_model(model, tp, options.micro_batch, options.sequence)
    bandwidth, environment = memory_bandwidth(device), Environment.of(device)
    rows: list[Row] = []
    for case in cases(sizes, Draw(torch.bfloat16 if device.type == "cuda" else torch.float32, device)):
        rows += kernel_rows(case, device, bandwidth, options.repeats)
    sys.stdout.write(f"{table(rows, columns_here())}\n")
    append(options.results, "kernels", environment, rows)
    print_lines(f"{environment.device}, {bandwidth / 1e9:.4g} GB/s in a large copy, which is the roofline.")


if __name__ == "__main__":
    sys.exit(main())
