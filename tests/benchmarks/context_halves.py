"""How much of the exchange of keys the halves of micro-batches hide: ``python -m tests.benchmarks.context_halves``.

Writes docs/figures/context_halves.md. Context parallel CPU ranks train for a step; what it takes is counted, not timed,
and thus the same on any machine: products and attention take their FLOPs, and a link brings what a rank sends or
receives, whichever is more, one exchange after the other, once all ranks have started it. How fast the link is says
each row. Everything else takes no time.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from boost_core.config import JobSpec, Layout
from boost_core.context.plan import BACKWARD
from boost_core.data.corpus import Sequences
from boost_core.parallel.communicator import Communicator, Pending
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.benchmarks.context_step import END, SHAPE, VOCABULARY
from tests.benchmarks.figures import FIGURES, write_table
from tests.benchmarks.lengths import documents_of, triangle
from tests.ranks import Ranks

RANKS, TOKENS, SEQUENCES, LAYERS = 4, 2**11, 4, 4
RATIOS = (0.5, 0.75, 1.0)  # seconds of the exchange over those of computing, with micro-batches of one sequence
WAYS = {"of one sequence": (1, False), "of two": (2, False), "of two, in halves": (2, True)}
LENGTHS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "one document": lambda _: (TOKENS,),
    "wlbllm's lengths": lambda number: documents_of("wlbllm", TOKENS, number),
}


Event = tuple[str, float]  # compute: FLOPs; start: bytes; wait: the number of an exchange


@dataclass
class Trace(TorchDispatchMode):
    """What a rank does, in order.

    Attributes:
        events: What it does.
        starts: How many exchanges it has started.
    """

    events: list[Event] = field(default_factory=list)
    starts: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if flops := _flops(function._overloadpacket, arguments, keywords or {}, result):
            self.events.append(("compute", flops))
        return result


def _flops(packet: Any, arguments: Any, keywords: dict[str, Any], result: Any) -> float:
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        (query, key), at, times = arguments[:2], 4, 1.0
    elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        (query, key), at, times = arguments[1:3], 7, BACKWARD
    else:
        return float(flop_registry[packet](*arguments, **keywords, out_val=result)) if packet in flop_registry else 0.0
    queries, keys = query.shape[2], key.shape[2]
    is_causal = len(arguments) > at and arguments[at]  # left out where it is the default
    pairs = triangle(queries) if is_causal else queries * keys
    return float(times * 4 * pairs * query.shape[1] * query.shape[3])


@dataclass(frozen=True)
class Noted:
    """An exchange under way."""

    trace: Trace
    number: int
    pending: Pending

    def wait(self) -> None:
        self.trace.events.append(("wait", self.number))
        self.pending.wait()


class SomeWindows:
    """The same tokens each step, with documents of given lengths in each sequence."""

    def __init__(self, lengths: str) -> None:
        self._tokens = np.random.default_rng(0).integers(1, VOCABULARY, (SEQUENCES, TOKENS + 1))
        for number, row in enumerate(self._tokens):
            row[np.cumsum(LENGTHS[lengths](number)) - 1] = END

    def sequences(self, _first: int, _count: int) -> Sequences:
        return self._tokens


def traced(lengths: str, micro_batch: int, split: bool) -> list[Event]:
    """A step of this rank."""
    spec = JobSpec.model_validate(
        {
            "name": "halves",
            "model": SHAPE | {"num_hidden_layers": LAYERS},
            "parallelism": Layout(1, 1, 1, cp=RANKS).sizes | {"split_micro_batch": split},
            "data": {"documents_apart": True},
            "training": {
                "steps": 1, "sequence_length": TOKENS, "global_batch_size": SEQUENCES, "micro_batch_size": micro_batch,
            },
        }
    )  # fmt: skip
    state = TrainState.initial(spec, torch.device("cpu"), end_of_document=END)
    state.draw()
    trace, start = Trace(), Communicator.start_uneven_all_to_all

    def started(self: Communicator, received: Any, payload: Any, rows: Any, purpose: str) -> Noted:
        most = max(sum(counts) - counts[self.rank] for counts in rows)
        trace.events.append(("start", float(most * payload.shape[1] * payload.element_size())))
        trace.starts += 1
        return Noted(trace, trace.starts - 1, start(self, received, payload, rows, purpose))

    with patch.object(Communicator, "start_uneven_all_to_all", started), trace:
        training_step(state, SomeWindows(lengths))  # type: ignore[arg-type]
    return trace.events


def waited(traces: Sequence[Sequence[Event]], byte: float) -> float:
    """What ranks wait for exchanges, in the mean, where a byte takes so long and a FLOP takes 1."""
    sent = ([size for kind, size in trace if kind == "start"] for trace in traces)
    sizes = [max(each) for each in zip(*sent, strict=True)]
    ranks = [_Rank(iter(trace)) for trace in traces]
    ends, free = list[float](), 0.0
    for number in range(len(sizes) + 1):
        for rank in ranks:  # until it starts this exchange, for which it needs the ends of earlier ones only
            rank.go(ends)
        if number < len(sizes):
            free = max(free, *(rank.now for rank in ranks)) + byte * sizes[number]
            ends.append(free)
    return statistics.mean(rank.waited for rank in ranks)


@dataclass
class _Rank:
    """A rank on its way through its trace."""

    left: Iterator[Event]
    now: float = 0.0
    waited: float = 0.0

    def go(self, ends: Sequence[float]) -> None:
        """Go on until the next exchange starts, or to the end."""
        for kind, size in self.left:
            if kind == "start":
                return
            if kind == "compute":
                self.now += size
            elif ends[int(size)] > self.now:
                self.waited += ends[int(size)] - self.now
                self.now = ends[int(size)]


def rows(pool: Ranks, lengths: str) -> Iterator[list[str]]:
    """What ranks wait of the time that they compute, in each way."""
    traces = [pool.run(RANKS, traced, lengths, *way) for way in WAYS.values()]
    computed, sent = (
        [sum(size for trace in of_ranks for kind, size in trace if kind == what) / RANKS for of_ranks in traces]
        for what in ("compute", "start")
    )
    for ratio in RATIOS:
        byte = ratio * computed[0] / sent[0]
        shares = [waited(of_ranks, byte) / computed[0] for of_ranks in traces]
        yield [
            lengths, f"{ratio:.2f}", *(f"{share:.3f}" for share in shares), f"{1 - shares[2] / shares[0]:.2f}",
            *(f"{each / sent[0]:.2f}" for each in sent[1:]),
        ]  # fmt: skip


def main() -> None:
    pool = Ranks()
    try:
        found = [row for lengths in LENGTHS for row in rows(pool, lengths)]
    finally:
        pool.close()
    header = [
        f"{TOKENS:,} tokens on {RANKS} ranks", "exchange over computation",
        *(f"waited, micro-batches {way}" for way in WAYS), "hidden by halves",
        "bytes, of two over of one", "bytes, in halves over of one",
    ]  # fmt: skip
    write_table(FIGURES / "context_halves.md", header, found)


if __name__ == "__main__":
    main()
