"""Plans compared with other planners' and with brute force: ``python -m tests.benchmarks.planning``.

Writes docs/figures/planning.md, and every plan to ``planning.csv``. All plans are judged by the played pipeline
(``boost_core/plan/replay.py``), on the network as it is; nothing of it ran. What is asked is in ``planning.yaml``. It
takes five minutes of one core.
"""

import csv
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from boost_core.config import JobSpec, Layout
from boost_core.config.job import layout_problems
from boost_core.hardware import DEVICE_BYTES
from boost_core.plan import search as searching
from boost_core.plan.machine import NetworkConfig, machine_of
from boost_core.plan.memory import rank_memory
from boost_core.plan.search import Choice, largest_part, longer, search
from boost_core.plan.throughput import ORDER
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.benchmarks.planners import PLANNERS, Question
from tests.planning_truth import drawn, fastest, replayed_parts

ASKED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "planning.yaml").read_text())
_LOOPS = 100_000  # additions of the loop that times are beside


@dataclass(frozen=True)
class Judged:
    """One question, and what came of it.

    Attributes:
        cluster: Its network.
        sequences: Of a step.
        model: Family and size.
        gpus: How many.
        ours: Our plan.
        others: Those of the other planners, by name; none of one that found nothing.
        searched: How many times as long as the reference loop our search took.
    """

    cluster: str
    sequences: int
    model: str
    gpus: int
    ours: Choice
    others: dict[str, Choice]
    searched: float

    def ratio(self, planner: str) -> float | None:
        """How many times as long as ours another plan takes."""
        other = self.others.get(planner)
        return None if other is None else other.seconds.total / self.ours.seconds.total

    def row(self) -> list[str]:
        """For the list of all of them."""
        ratios = [self.ratio(name) for name in PLANNERS]
        slowest = max(self.others.values(), key=lambda other: other.seconds.total)
        return [
            self.cluster, str(self.sequences), self.model, str(self.gpus), str(self.ours),
            f"{self.ours.seconds.total:.4g}", largest_part(self.ours),
            *("" if each is None else f"{each:.3f}" for each in ratios), longer(slowest, self.ours).partition(": ")[2],
        ]  # fmt: skip


def reference_seconds() -> float:
    """Of a loop of additions, as this machine is now."""
    begun, total = time.process_time(), 0
    for number in range(_LOOPS):
        total += number
    return time.process_time() - begun


def job(model: str, family: str, sequences: int) -> JobSpec:
    """One of those that are planned."""
    training = {
        "steps": 10, "sequence_length": ASKED["sequence_length"], "global_batch_size": sequences,
        "micro_batch_size": 1, "precision": "bf16",
    }  # fmt: skip
    return JobSpec.model_validate(
        {
            "name": "planned", "model": {"preset": model, "family": family, "vocab_size": 32_000},
            "training": training, "resources": {"gpus_per_worker": 1, "accelerator_type": ASKED["accelerator"]},
        }
    )  # fmt: skip


def judged() -> Iterator[Judged]:
    """All questions and their answers."""
    device = DEVICE_BYTES[ASKED["accelerator"]]
    for (name, levels), sequences, family, model, gpus in product(
        ASKED["clusters"].items(), ASKED["sequences"], ASKED["families"], ASKED["models"], ASKED["gpus"]
    ):
        spec = job(model, family, sequences)
        machine = machine_of(spec, cluster=NetworkConfig.model_validate({"levels": levels}).cluster())
        begun = time.process_time()
        choices = search(spec, gpus, machine, device, 1).choices
        searched = (time.process_time() - begun) / reference_seconds()
        if not choices:
            continue
        question = Question(spec, gpus, machine, device, **ASKED["mcmc"])
        others = {}
        for planner, plans in PLANNERS.items():
            if planned := plans(question):
                layout = Layout.of(planned.parallelism)
                needed = rank_memory(planned, layout).total
                others[planner] = Choice(planned, replayed_parts(planned, layout, machine), needed)
        yield Judged(name, sequences, f"{family} {model}", gpus, choices[0], others, searched)


def beside_brute_force(seeds: Iterable[int]) -> list[tuple[float, float]]:
    """Of small instances, our plan's seconds over those of the fastest: with the default cut, and with any."""
    found = []
    for seed in seeds:
        instance = drawn(seed)
        choices = search(instance.job, instance.gpus, instance.machine, instance.device_bytes, 1).choices
        if choices:
            ours = choices[0].seconds.total
            found.append((ours / fastest(instance, ours, all_cuts=False), ours / fastest(instance, ours)))
    return found


def memory_times() -> float:
    """How many times as long as the reference loop a shape's memory takes, in the mean over those of 1,024 GPUs."""
    spec = job("13b", "cola", max(ASKED["sequences"]))
    machine = machine_of(spec)
    seen = searching._Search(spec, 1024, machine, 0.0, 1, ORDER, 0.0)
    jobs = [
        each
        for shape, replicas, *_ in seen._shapes()
        for recompute in ("none", "latent", "full")
        if not layout_problems(
            (each := seen._job(shape, replicas[0]).with_parallelism(recompute=recompute)).model,
            each.parallelism,
            each.training,
            each.optimizer,
            each.resources.gpus_per_worker,
        )
    ]
    begun = time.process_time()
    for each in jobs:
        rank_memory(each, Layout.of(each.parallelism))
    return (time.process_time() - begun) / len(jobs) / reference_seconds()


def means(found: Sequence[Judged]) -> Iterator[list[str]]:
    """Of each cluster and planner: mean, least and largest ratio, and how many plans are faster than ours."""
    alone = {cluster: [cluster] for cluster in ASKED["clusters"]}
    for name, clusters in (alone | {" and ".join(ASKED["oversubscribed"]): ASKED["oversubscribed"]}).items():
        asked = [each for each in found if each.cluster in clusters]
        row = [name]
        for planner in PLANNERS:
            ratios = [ratio for each in asked if (ratio := each.ratio(planner))]
            faster = sum(ratio < 1 - 1e-9 for ratio in ratios)
            missing = len(asked) - len(ratios)
            text = f"{statistics.geometric_mean(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})"
            notes = [f", {faster} faster"] * bool(faster) + [f", {missing} without a plan"] * bool(missing)
            row.append(text + "".join(notes))
        yield row


def by_batch(found: Sequence[Judged]) -> Iterator[str]:
    """The lines of a table of ``means`` for each number of sequences."""
    for sequences in ASKED["sequences"]:
        asked = [each for each in found if each.sequences == sequences]
        heading = f"### {sequences:,} sequences per step"
        yield from (heading, "", *table(["cluster", *PLANNERS], list(means(asked))), "")


def truth(found: Sequence[tuple[float, float]]) -> list[str]:
    """What brute force says, in words."""
    lines = []
    for name, ratios in zip(("with the default cut", "with every cut"), zip(*found, strict=True), strict=True):
        near = sum(ratio <= 1.01 for ratio in ratios) / len(ratios)
        lines.append(f"- {name}: {near:.1%} within 1 % of the fastest, the worst {max(ratios) - 1:.1%} off")
    return lines


def page(found: Sequence[Judged], small: Sequence[tuple[float, float]], memory: float) -> str:
    """The figure.

    Args:
        found: Of ``judged``.
        small: Of ``beside_brute_force``.
        memory: Of ``memory_times``.
    """
    searched = [each.searched for each in found if each.gpus == max(ASKED["gpus"])]
    lines = [
        "# Plans compared with other planners'", "",
        "Simulated; nothing was run on a GPU. `python -m tests.benchmarks.planning` writes this page from "
        "`tests/benchmarks/planning.yaml`.", "",
        "## Step times relative to ours", "",
        "Seconds of a step relative to our plan, simulated pass by pass on the actual network: geometric mean "
        f"(smallest – largest) of up to {prod(len(ASKED[each]) for each in ('families', 'models', 'gpus'))} cases. "
        f"Sequences have {ASKED['sequence_length']:,} tokens; {ASKED['accelerator']}, nominal rates. manual: tensor "
        "parallel ranks fill a node, then as few pipeline ranks as fit. flat network: our search with a single "
        "bandwidth, the geometric mean of the levels', or that of a node. memory last: our search without a memory "
        "limit, then twice the tensor and then the pipeline parallel ranks until it fits; the same with micro-batches "
        f"of one sequence. MCMC: {ASKED['mcmc']['chains']} chains of {ASKED['mcmc']['steps']:,} steps with the "
        "formula. NEST: its step formula, 1f1b, stages on the first free devices. All of them use the same costs and "
        "the same memory; ours and the flat ones mix memory modes and cut stages, the others have one mode for all "
        "blocks and the default cut.", "",
        *by_batch(found),
        "## Comparison with brute force", "",
        f"The {len(small)} of {ASKED['small_instances']} random instances for which something fits, with at most 8 "
        "blocks and 16 GPUs over two or three levels; all sizes, micro-batches and schedules, and one mode for all "
        "blocks:", "", *truth(small), "",
        "By default a gang cuts a model by the work of its blocks and head; a plan's own cut can give fewer blocks to "
        "the first stages, which keep more micro-batches.", "",
        "## How long it takes", "",
        f"Compared with a loop of {_LOOPS:,} additions on the same core: a search at {max(ASKED['gpus']):,} GPUs takes "
        f"{statistics.median(searched):.0f} times as long in the median, {max(searched):.0f} at most; the memory of a "
        f"shape {memory:.3f} times. The loop took {1000 * reference_seconds():.1f} ms.", "",
        "## All plans", "",
        "`tests/benchmarks/planning.csv` lists them: our plan, its step time and the largest part of it, the others' "
        "step times relative to ours, and what the slowest of them spends more time on.",
    ]  # fmt: skip
    wrapped = [each for line in lines for each in ([line] if line.startswith("|") else wrap(line, 120) or [""])]
    return "\n".join([*wrapped, "", provenance(), ""])


def main() -> None:
    """Plan, judge and write the figure."""
    found = list(judged())
    with (Path(__file__).parent / "planning.csv").open("w", newline="") as file:
        write = csv.writer(file, lineterminator="\n").writerow
        write(["cluster", "sequences", "model", "gpus", "plan", "seconds", "deciding term", *PLANNERS, "slowest has"])
        for each in found:
            write(each.row())
    small = beside_brute_force(range(ASKED["small_instances"]))
    (FIGURES / "planning.md").write_text(page(found, small, memory_times()))


if __name__ == "__main__":
    main()
