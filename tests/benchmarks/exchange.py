"""A step's time under each strategy and choice, side by side: ``python -m tests.benchmarks.exchange``.

Two CPU ranks of one thread each over gloo: what is measured is the arithmetic and the number and width of exchanges,
not the overlap that a GPU's streams give. All choices take turns, so that a busy machine slows all alike.
"""

import statistics
import time

import torch
import torch.distributed as dist

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.shard import make_weights
from tests.benchmarks.figures import FIGURES, write_table
from tests.numerics.sharded import batch
from tests.ranks import Ranks

SEQUENCES, LENGTH, ROUNDS = 4, 256, 12
Fields = dict[str, object]
SHAPE: Fields = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1024,
}  # fmt: skip
LOW_RANK: Fields = {**SHAPE, "rank": 128}
CHOICES: dict[str, tuple[Fields, Fields]] = {
    "dense, fullrank": (SHAPE | {"family": "dense"}, {}),
    "cola, vanilla": (LOW_RANK, {"strategy": "vanilla"}),
    "cola, btp": (LOW_RANK, {}),
    "cola, btp, ungrouped": (LOW_RANK, {"group_projections": False}),
    "cola, btp, online_paper": (LOW_RANK, {"norm": "online_paper"}),
    "cola, btp, sync": (LOW_RANK, {"norm": "sync"}),
    "cola, btp, split": (LOW_RANK, {"split_micro_batch": True}),
    "cola, btp, recompute latent": (LOW_RANK, {"recompute": "latent"}),
    "cola, btp, recompute full": (LOW_RANK, {"recompute": "full"}),
}
Measured = dict[str, list[tuple[float, float, int]]]


def measure() -> Measured:
    """Seconds of forward and backward, seconds of them waited for exchanges, and bytes sent; a list over rounds."""
    steps = {name: Step(ModelConfig.model_validate(shape), choice) for name, (shape, choice) in CHOICES.items()}
    for step in steps.values():
        step()
    measured: Measured = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            measured[name].append(step())
    return measured


class Step:
    """Forward and backward of one micro-batch."""

    def __init__(self, model: ModelConfig, choice: Fields) -> None:
        self.ledger = CommunicationLedger()
        collectives = Communicator(dist.group.WORLD, "tp", self.ledger)
        self.network, axes = build(model, ParallelismConfig.model_validate(choice), collectives)
        make_weights(self.network, axes, collectives.rank, collectives.size, 1, torch.device("cpu"))
        self.tokens, self.targets = (each.flatten() for each in batch(model, SEQUENCES, LENGTH))
        self.rotation = Rotation(LENGTH, model.head_size, model.rope_theta, torch.device("cpu"))

    def __call__(self) -> tuple[float, float, int]:
        """Run it once."""
        self.ledger.clear()
        dist.barrier()
        started = time.perf_counter()
        self.network(self.tokens, self.targets, self.rotation).mean().backward()
        seconds = time.perf_counter() - started
        sent = self.ledger.sum()
        self.network.zero_grad()
        return seconds, sent.exposed_seconds, sent.bytes


def main() -> None:
    """Measure and write the table."""
    ranks = Ranks()
    measured: Measured = ranks.run(2, measure)[0]
    ranks.close()
    base = [seconds for seconds, _, _ in measured["cola, btp"]]
    rows = []
    for name, runs in measured.items():
        ratios = [seconds / there for (seconds, _, _), there in zip(runs, base, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=5)
        waited = statistics.median(exposed / seconds for seconds, exposed, _ in runs)
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.2f}",
                f"{low:.2f} – {high:.2f}",
                f"{waited:.0%}",
                f"{runs[0][2] / 2**20:.1f} MiB",
            ]
        )
    header = ["variant", "time relative to btp, median", "p20 – p80", "waiting for exchanges", "sent per rank"]
    write_table(FIGURES / "exchange.md", header, rows)


if __name__ == "__main__":
    main()
