"""The plan's times beside the BOOST paper's (arXiv 2512.12131): A100-80GB, 4 sequences of 4096, bf16, r = d/4.

The paper does not say how its GPUs are wired. Its times at tp 2 follow from boards of four where every two have
100 GB/s a direction to each other (NVIDIA's HGX A100 of four GPUs), and not from a switch, at which two have 300 GB/s
as four do: vanilla at 3B would be 22 % below its time. What ``plan.machine`` takes of an A100's data sheet was chosen
by the rows of 1B and 3B, and by other published runs (``published_runs``); those of 7B were held out.
"""

from dataclasses import dataclass, replace
from math import log, sqrt
from statistics import median

import pytest

from boost_core.config import JobSpec
from boost_core.config.parallelism import Layout
from boost_core.hardware import LINKS
from boost_core.plan.machine import Cluster, Level, machine_for
from boost_core.plan.report import step_parts
from boost_core.plan.throughput import StepParts

STRATEGIES = ("fullrank", "vanilla", "btp")
BOARDS_OF_FOUR = Cluster(
    (Level("board", 4, LINKS["nvlink-a100"], meshed=True), Level("fabric", 1024, LINKS["fabric-200g"]))
)


@dataclass(frozen=True)
class Published:
    """Seconds an iteration with full-rank, vanilla low-rank and BOOST's weights."""

    preset: str
    tensor: int
    pipeline: int
    fullrank: float
    vanilla: float
    btp: float


FITTED = (Published("1b", 1, 1, 0.85, 0.56, 0.59), Published("3b", 2, 1, 1.14, 1.41, 0.78))
HELD_OUT = Published("7b", 4, 1, 1.06, 1.64, 0.72)
# How many micro-batches a step had there is not said: eight of one sequence come nearest to all six times.
PIPELINES = (Published("13b", 4, 2, 2.07, 2.42, 1.30), Published("30b", 4, 4, 2.43, 2.58, 1.27))


def parts(run: Published, strategy: str, network: Cluster | None = BOARDS_OF_FOUR) -> StepParts:
    # Putting projections of one input together is BOOST's, as is its form of the norm; its vanilla has a pair of
    # collectives for each projection.
    choices = {"group_projections": strategy != "vanilla"} | ({"norm": "online_paper"} if strategy == "btp" else {})
    model = {"preset": run.preset, "family": "dense" if strategy == "fullrank" else "svd", "vocab_size": 32_000}
    training = {
        "steps": 1, "sequence_length": 4096, "micro_batch_size": 1 if run.pipeline > 1 else 4, "precision": "bf16",
        "global_batch_size": 8 if run.pipeline > 1 else 4,
    }  # fmt: skip
    spec = JobSpec.model_validate(
        {
            "name": "published",
            "model": model | ({"intermediate_size": 5504} if run.preset == "1b" else {}),
            "parallelism": {
                "tensor_parallel_size": run.tensor, "pipeline_parallel_size": run.pipeline, "strategy": strategy,
                **choices,
            },
            "training": training,
            "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
        }
    )  # fmt: skip
    machine = machine_for(spec.resources, "bf16")
    if network is not None:
        machine = replace(machine, cluster=network)
    return step_parts(spec, Layout.of(spec.parallelism), machine)


def seconds(run: Published, strategy: str, network: Cluster | None = BOARDS_OF_FOUR) -> float:
    return parts(run, strategy, network).total


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_times_that_were_held_out(strategy: str) -> None:
    assert seconds(HELD_OUT, strategy) == pytest.approx(getattr(HELD_OUT, strategy), rel=0.15)


def test_times_that_the_profile_was_chosen_by() -> None:
    errors = [log(seconds(run, strategy) / getattr(run, strategy)) for run in FITTED for strategy in STRATEGIES]
    assert sqrt(sum(error**2 for error in errors) / len(errors)) < 0.06
    assert max(map(abs, errors)) < 0.1


NETWORKS = pytest.mark.parametrize("network", [BOARDS_OF_FOUR, None], ids=["boards", "switch, as assumed"])


@NETWORKS
def test_all_rows_come_near(network: Cluster | None) -> None:
    errors = [
        abs(seconds(run, strategy, network) / getattr(run, strategy) - 1)
        for run in (*FITTED, HELD_OUT, *PIPELINES) for strategy in STRATEGIES
    ]  # fmt: skip
    assert median(errors) < 0.09


@NETWORKS
@pytest.mark.parametrize("run", [*FITTED, HELD_OUT, *PIPELINES], ids=lambda run: run.preset)
def test_strategies_come_in_the_order_in_which_they_did(run: Published, network: Cluster | None) -> None:
    by_plan = sorted(STRATEGIES, key=lambda strategy: seconds(run, strategy, network))
    by_clock = sorted(STRATEGIES, key=run.__getattribute__)
    if run.tensor == 1:  # BOOST's was 5 % behind vanilla, which is the same without tensor parallelism
        assert seconds(run, "btp", network) == pytest.approx(seconds(run, "vanilla", network), rel=0.01)
        assert by_plan[-1] == by_clock[-1]
    else:
        assert by_plan == by_clock


@pytest.mark.parametrize("run", [*PIPELINES, HELD_OUT], ids=lambda run: run.preset)
def test_boost_is_faster_by_about_as_much_as_it_was(run: Published) -> None:
    fullrank, vanilla, btp = (seconds(run, strategy) for strategy in STRATEGIES)
    assert vanilla / btp == pytest.approx(run.vanilla / run.btp, rel=0.25)
    assert fullrank / btp == pytest.approx(run.fullrank / run.btp, rel=0.2)


def test_what_makes_vanilla_slow_is_its_exchange_and_all_heads_on_every_rank() -> None:
    vanilla, btp = parts(HELD_OUT, "vanilla"), parts(HELD_OUT, "btp")
    assert vanilla.exchange > 4 * btp.exchange
    assert vanilla.arithmetic - btp.arithmetic > 0.25
