"""Where a step's time goes, by arithmetic: ``python -m tests.benchmarks.step_arithmetic``.

Writes docs/figures/step.md and step.csv: every kernel of one rank's captured step of 7B CoLA at tp 4, with its
launches, bytes and FLOPs, the least time that an H100 could take for it, and the time at the rates that the plan
assumes (``plan.machine.Profile``). Beside it the same count of a step as published.

It runs itself on the mock GPU (``tests.mock_gpu``), whose log tells launches, copies and event records. What each of
them moves and computes is told by marks in it: around each of torch's operations, by its arguments; around each Triton
kernel, by the loads and stores of what was compiled; and where collectives start and are waited for. Nothing is timed.
"""

import argparse
import csv
import ctypes
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boost_core.hardware import LINK_EFFICIENCY, LINKS, Device, device_named
from boost_core.plan.machine import BANDWIDTH_SHARE, TILE_DEPTH, Profile, Work
from boost_core.plan.throughput import collective_seconds, link_bytes
from tests.benchmarks.figures import FIGURES, table

RANKS, LENGTH = 4, 4096
GPU, LINK = "H100", "nvlink-h200"

# Assumed, and not in the plan.
GAP_SECONDS = 1.5e-6  # between two nodes of a graph on one stream: a grid drains, the next one fills the device
OTHER_SHARE = 0.75  # of the peak in products, whatever they read and write, beside the fitted sum
COLLECTIVE_SHARE = 20 / 132  # of the device's multiprocessors, which a collective under way takes from what is computed

# Reading the log: what the device does, each for one line. Marks are lines of their own.
LAUNCHES = re.compile(r"(kernel|gemm|copy|fill|record external|record timed external)\b")
MARK = "mark "


@dataclass
class Entry:
    """One operation of a step, or a collective's start or wait.

    Attributes:
        part: The part of the step that it counts for.
        name: The operation or kernel.
        launches: How many nodes of the graph it is.
        moved: Bytes that it reads and writes.
        flops: FLOPs of products or attention.
        outputs: Elements of products' results.
        seconds: Duration, of a collective.
        limit: The part of it that its bytes would take at the link's nominal rate.
        collective: Its number, if this is a collective's start; negative, the number of the one waited for.
    """

    part: str
    name: str
    launches: int = 0
    moved: int = 0
    flops: float = 0.0
    outputs: int = 0
    seconds: float = 0.0
    limit: float = 0.0
    collective: int | None = None


def entries(lines: Iterable[str]) -> Iterator[Entry]:
    """Read a log: launches count for the innermost operation whose marks they are between."""
    around: list[Entry] = []
    for line in lines:
        if line.startswith(MARK):
            word, _, rest = line[len(MARK) :].strip().partition(" ")
            if word == "begin":
                around.append(Entry("", ""))
            elif word == "end":
                entry = around.pop()
                known = Entry(**json.loads(rest))
                known.launches = entry.launches
                if known.launches:
                    yield known
            elif word == "collective":
                yield Entry(**json.loads(rest))
        elif LAUNCHES.match(line):
            if around:
                around[-1].launches += 1
            else:
                word = line.partition(" ")[0]
                yield Entry("events" if word == "record" else "passes", word, 1)


# Writing the marks, on the mock.


def mark(words: str) -> None:
    ctypes.CDLL(None).mock_gpu_mark(words.encode())


def touched(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements in memory; those that are repeated by a stride of zero count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()


class Marking(TorchDispatchMode):
    """Puts a mark before and after each of torch's operations.

    Attributes:
        part: What operations count for that are neither products nor attention.
    """

    part = "passes"
    PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm"})
    OVERWRITES = frozenset({"copy_", "zero_", "fill_"})

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords, name = keywords or {}, function.overloadpacket.__name__
        mark("begin")
        result = function(*arguments, **keywords)
        out = keywords.get("out")
        given = [each for each in tree_leaves((arguments, {**keywords, "out": None})) if isinstance(each, torch.Tensor)]
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        part, flops, outputs = self.part, 0.0, 0
        if name in self.PRODUCTS:
            outputs = made[0].numel()
            part, flops = "products", 2.0 * outputs * given[-1].shape[-2]
            if keywords.get("beta") == 0:
                given = given[-2:]
        elif "attention" in name:
            part, flops = "attention", attention_flops(name, given)
            made = [each for each in made if each.dim() > 2]
        elif name in self.OVERWRITES:
            given = given[1:]
        elif name == "embedding":
            given = [given[1], made[0]]
        unique = {id(each): each for each in (*given,)}.values()
        moved = sum(map(touched, unique)) + sum(map(touched, [out] if out is not None else made))
        known = {"part": part, "name": f"aten::{name}", "moved": moved, "flops": flops, "outputs": outputs}
        mark("end " + json.dumps(known))
        return result


def attention_flops(name: str, given: Sequence[torch.Tensor]) -> float:
    """FLOPs of causal attention, ``[b, h, s, e]``, as ``plan.throughput`` counts them."""
    batch, heads, length, width = given[0].shape
    each = 10 if "backward" in name else 4
    return each * batch * heads * width * length * (length + 1) / 2


def accesses(ttir: str) -> dict[str, set[str]]:
    """Whether a compiled kernel loads from each tensor that it is given, and whether it stores to it."""
    origin: dict[str, str] = {}
    counts: dict[str, set[str]] = defaultdict(set)
    for line in ttir.splitlines():
        if found := re.match(r"\s*(%[\w.]+) = tt\.(?:addptr|splat|broadcast|bitcast) (%[\w.]+)", line):
            origin[found[1]] = origin.get(found[2], found[2])
        elif found := re.match(r"\s*(?:%[\w.]+ = )?tt\.(load|store) (%[\w.]+)", line):
            counts[origin.get(found[2], found[2]).lstrip("%")].add(found[1])
    return dict(counts)


@contextmanager
def marked_kernels(marking: Marking) -> Iterator[None]:
    """Put marks before and after each of Triton's kernels."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def marked(self: Any, *arguments: Any, grid: Any, warmup: Any, **keywords: Any) -> Any:
        mark("begin")
        kernel = run(self, *arguments, grid=grid, warmup=warmup, **keywords)
        kinds = accesses(kernel.asm["ttir"])
        # Another tensor's pointer stands for one that a launch does not use.
        moved = {
            (each.data_ptr(), kind): touched(each)
            for name, each in zip(self.arg_names, arguments, strict=False)
            if isinstance(each, torch.Tensor)
            for kind in kinds.get(name, ())
        }
        name = f"{self.__module__.rpartition('.')[2]}.{self.__name__.lstrip('_')}"
        mark("end " + json.dumps({"part": marking.part, "name": name, "moved": sum(moved.values()), "flops": 0.0}))
        return kernel

    with patch.object(JITFunction, "run", marked):
        yield


@dataclass
class MarkedPending:
    """A collective whose wait is marked."""

    pending: Any
    number: int

    def wait(self) -> None:
        mark("collective " + json.dumps({"part": "exchange", "name": "wait", "collective": -self.number}))
        self.pending.wait()


@contextmanager
def marked_collectives() -> Iterator[None]:
    """Put marks where collectives start and are waited for."""
    from boost_core.parallel.communicator import CommunicationLedger

    start, number = CommunicationLedger.start, 0

    def marked(self: Any, entry: Any, payload: torch.Tensor, launch: Any) -> Any:
        nonlocal number
        number += 1
        link, kind, sent = LINKS[LINK], entry.kind, payload.nbytes
        limit = LINK_EFFICIENCY * link_bytes(kind, RANKS, sent) / link.bytes_per_second
        fields = {
            "part": "exchange", "name": f"{kind}, {entry.purpose}", "moved": sent, "limit": limit,
            "seconds": collective_seconds(link, kind, RANKS, sent), "collective": number,
        }  # fmt: skip
        mark("collective " + json.dumps(fields))
        return MarkedPending(start(self, entry, payload, launch), number)

    with patch.object(CommunicationLedger, "start", marked):
        yield


def counted_for(marking: Marking, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, such that what it does counts for a part."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        before, marking.part = marking.part, part
        try:
            return method(*arguments, **keywords)
        finally:
            marking.part = before

    return run


def record(name: str, micro_batch: int, parallelism: dict[str, Any], as_published: bool) -> None:
    """Do a step on the mock with marks: its capture and its update, or the operations of a published step."""
    from boost_core.bench import rank
    from boost_core.optim import zero
    from boost_core.train import step, step_graph
    from tests.benchmarks.rank import Variant
    from tests.gpu import published

    marking, mock = Marking(), ctypes.CDLL(None)

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before, marking.part = marking.part, "optimizer" if name == "optimizer" else "passes"
        yield
        marking.part = before

    with ExitStack() as patches:
        for owner, method in (
            (zero.Gradients, "begin"), (zero.Gradients, "_settle"), (published.PublishedRun, "_accumulate"),
        ):  # fmt: skip
            counted = counted_for(marking, "optimizer", getattr(owner, method))
            patches.enter_context(patch.object(owner, method, counted))
        for module in (published, step):
            patches.enter_context(patch.object(module, "record_function", phase))
        patches.enter_context(patch.object(zero, "adds_products", lambda *_: True))  # it would find out from numbers
        patches.enter_context(marked_kernels(marking))
        patches.enter_context(rank.alone(RANKS))
        make_step = published.published_step if as_published else rank.step_of
        variant = Variant(name, "cola", parallelism, make_step=make_step)
        shape = rank.RunShape("7b", RANKS, micro_batch, LENGTH)
        run, _, graph = variant.step(shape, torch.device("cuda", 0))
        if graph is not None:
            graph._all_agree = lambda yes: yes  # it would read a number
        for _ in range(step_graph.WARM_STEPS + 1):  # then the graph without events is captured, which most steps replay
            run()
        mock.mock_gpu_logging(1)
        mark(f"step {name}, micro-batch {micro_batch}")
        with marking, marked_collectives():
            run()
        mock.mock_gpu_logging(0)
        if graph is not None:
            if graph.obstacle is not None:
                raise RuntimeError(f"the step is not captured: {graph.obstacle}")
            graph.release("it is counted")


# The arithmetic.


@dataclass
class Sum:
    """Sums over a kernel's launches, or over a part of the step: nodes, bytes, FLOPs, and seconds at least and as we
    assume."""

    launches: int = 0
    moved: float = 0.0
    flops: float = 0.0
    limit: float = 0.0
    ours: float = 0.0

    def add(self, entry: Entry, limit: float, ours: float) -> None:
        self.launches += entry.launches
        self.moved += entry.moved
        self.flops += entry.flops
        self.limit += limit
        self.ours += ours


@dataclass
class Arithmetic:
    """A step's times.

    Attributes:
        kernels: By part and name.
        parts: By part.
    """

    kernels: dict[tuple[str, str], Sum] = field(default_factory=lambda: defaultdict(Sum))
    parts: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))

    @classmethod
    def of(
        cls, log: Iterable[Entry], device: Device, kernel: str, products: float | None = None
    ) -> "Arithmetic":  # fmt: skip
        """Play a log on one stream that computes and one that sends.

        While something is sent, what is computed is slower by the share of the device that it takes.

        Args:
            log: Read from the mock's log.
            device: What it would run on.
            kernel: Whose attention it would run: ``cudnn`` or ``flash``.
            products: The share of the peak that products have, whatever they read and write; by default the plan's sum.
        """
        result, peak = cls(), device.tflops["bf16"] * 1e12
        profile = Profile.nominal(device, "bf16")
        if kernel == "cudnn":
            profile = replace(profile, attention_flops=dict(profile.cudnn)[LENGTH])
        now = sent = 0.0  # when both streams have done everything so far
        ends: dict[int, float] = {}

        def count(entry: Entry, limit: float, ours: float) -> None:
            result.kernels[entry.part, entry.name].add(entry, limit, ours)
            result.parts[entry.part].add(entry, limit, ours)

        for entry in log:
            if entry.collective is None:
                work = Work(product_flops=entry.flops, moved_bytes=entry.moved, outputs=entry.outputs)
                if entry.part == "attention":  # whose bytes the plan does not count
                    work = Work(attention_flops=entry.flops)
                ours = profile.seconds(work)
                if entry.part == "products" and products is not None:
                    ours = entry.flops / (products * peak)
                count(entry, max(entry.flops / peak, entry.moved / device.bandwidth), ours)
                slow = 1 - COLLECTIVE_SHARE
                lost = min(ours / slow, max(0.0, sent - now)) * COLLECTIVE_SHARE
                gaps = entry.launches * GAP_SECONDS
                count(Entry("launch gaps", "between nodes"), 0.0, gaps)
                count(Entry("exchange", "slows what is computed"), 0.0, lost)
                now += ours + lost + gaps
            elif entry.collective > 0:
                sent = ends[entry.collective] = max(now, sent) + entry.seconds
                count(entry, entry.limit, 0.0)
            else:
                waited = max(0.0, ends[-entry.collective] - now)
                count(Entry("exchange", "waited for"), 0.0, waited)
                now += waited
        return result

    @property
    def total(self) -> Sum:
        """The whole step."""
        whole = Sum()
        for each in self.parts.values():
            for name, value in vars(each).items():
                setattr(whole, name, getattr(whole, name) + value)
        return whole


PARTS = ("products", "attention", "passes", "optimizer", "exchange", "events", "launch gaps")


def assumed(device: Device) -> list[list[str]]:
    """What the arithmetic takes from elsewhere: of what, which figure, and its source."""
    shares = device.shares
    return [
        ["products",
         f"{shares.products:.0%} of {GPU}'s peak, for each tile as long as {TILE_DEPTH} more of the inner width, and "
         "operands read and written at the rate of passes: the sum with which the share was fitted",
         f"`hardware.Shares`: {shares.source}"],
        ["attention",
         f"{dict(shares.cudnn)[LENGTH]:.0%} of the peak in ours, by cuDNN; {shares.attention:.0%} as published, by "
         "FlashAttention-2, whose kernels are counted in both", "likewise"],
        ["passes", f"{BANDWIDTH_SHARE:.0%} of the memory's bandwidth", "`plan.machine`"],
        ["exchange", f"{LINKS[LINK].description}", "`hardware.LINKS`"],
        ["beside an exchange",
         f"what is computed is {COLLECTIVE_SHARE:.0%} slower: 20 of 132 multiprocessors", "assumed"],
        ["launch gaps", f"{GAP_SECONDS * 1e6:g} µs for each node of a graph", "assumed"],
    ]  # fmt: skip


def write(steps: dict[str, Arithmetic], others: dict[str, Arithmetic], device: Device, folder: Path) -> None:
    """The table of parts of all steps and that of kernels of our own, and every kernel as data.

    ``others`` has the same steps with products at ``OTHER_SHARE``.
    """
    with (folder / "step.csv").open("w", newline="") as file:
        data = csv.writer(file, lineterminator="\n")
        data.writerow(("step", "part", "kernel", "launches", "MB", "GFLOP", "limit ms", "ours ms"))
        for step, arithmetic in steps.items():
            for (part, name), each in sorted(arithmetic.kernels.items(), key=lambda pair: -pair[1].ours):
                numbers = (each.moved / 1e6, each.flops / 1e9, each.limit * 1e3, each.ours * 1e3)
                data.writerow((step, part, name, each.launches, *(f"{number:.3f}" for number in numbers)))
    lines = [f"One rank of 7B CoLA, tp {RANKS}, sequences of {LENGTH}, on an {GPU}: milliseconds by arithmetic."]
    for step, arithmetic in steps.items():
        rows = [
            [part, str(each.launches), f"{each.moved / 1e9:.1f}", f"{each.limit * 1e3:.1f}", f"{each.ours * 1e3:.1f}"]
            for part, each in [*((part, arithmetic.parts[part]) for part in PARTS), ("**all**", arithmetic.total)]
        ]
        lines += ["", *table([step, "launches", "GB", "limit", "ms"], rows)]
        sums = [
            (each.total.ours * 1e3, (each.total.ours - each.parts["exchange"].ours) * 1e3)
            for each in (arithmetic, others[step])
        ]
        lines += [
            "", f"With products at {OTHER_SHARE:.0%} of the peak, without their bytes: {sums[1][0]:.1f} ms. If all "
            f"exchange were hidden and slowed nothing: {sums[0][1]:.1f} ms, with such products {sums[1][1]:.1f} ms.",
        ]  # fmt: skip
    lines.append("")
    step, arithmetic = next(iter(steps.items()))
    lines += [f"The largest of {step}; [all](step.csv).", ""]
    largest = sorted(arithmetic.kernels.items(), key=lambda pair: -pair[1].ours)[:30]
    lines += table(
        ["part", "kernel", "launches", "MB", "GFLOP", "limit", "ms"],
        [
            [part, f"`{name}`", str(each.launches), f"{each.moved / 1e6:.1f}", f"{each.flops / 1e9:.0f}",
             f"{each.limit * 1e3:.2f}", f"{each.ours * 1e3:.2f}"]
            for (part, name), each in largest
        ],
    )  # fmt: skip
    lines += ["", "What is assumed:", "", *table(["", "rate", "source"], assumed(device)), ""]
    lines += [f"Counted with torch {version('torch')}, Triton {version('triton')}.", ""]
    (folder / "step.md").write_text("\n".join(lines))


STEPS: tuple[tuple[str, int, dict[str, Any], bool], ...] = (
    ("ours", 1, {}, False),
    ("ours, split_micro_batch", 1, {"split_micro_batch": True}, False),
    ("ours", 4, {}, False),
    ("ours, split_micro_batch", 4, {"split_micro_batch": True}, False),
    ("as published", 1, {}, True),
    ("as published", 4, {}, True),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--on-mock", action="store_true", help="this process is on the mock already")
    parser.add_argument("--folder", type=Path, default=FIGURES, help="where the figures go")
    arguments = parser.parse_args()
    if not arguments.on_mock:
        mock = import_module("tests.mock_gpu").build("2.13")
        with TemporaryDirectory() as folder:
            variables = mock.variables(log=Path(folder) / "log")
            options = ("--on-mock", "--folder", arguments.folder.absolute())
            mock.run("-m", "tests.benchmarks.step_arithmetic", *options, variables=variables, seconds=600)
        return
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention's kernels are modelled, cuDNN's are not
    ctypes.CDLL(None).mock_gpu_logging(0)
    for each in STEPS:
        record(*each)
    steps, lines = dict[str, list[str]](), list[str]()
    with Path(os.environ["MOCK_GPU_LOG"]).open() as log:
        for line in log:
            if line.startswith(f"{MARK}step "):
                lines = steps.setdefault(line[len(f"{MARK}step ") :].strip(), [])
            else:
                lines.append(line)
    device = device_named(f"{GPU} SXM")
    assert device is not None
    kernels = {f"{name}, micro-batch {size}": "flash" if published else "cudnn" for name, size, _, published in STEPS}
    played, others = (
        {name: Arithmetic.of(entries(each), device, kernels[name], share) for name, each in steps.items()}
        for share in (None, OTHER_SHARE)
    )
    write(played, others, device, arguments.folder)


if __name__ == "__main__":
    main()
