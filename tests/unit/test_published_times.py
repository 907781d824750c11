"""The plan's times beside the BOOST paper's (arXiv 2512.12131): A100-80GB, 4 sequences of 4096, bf16, r = d/4."""

from dataclasses import dataclass

import pytest

from boost_core.config import JobSpec
from boost_core.config.layout import Layout
from boost_core.plan.throughput import step_seconds


@dataclass(frozen=True)
class Published:
    """Seconds an iteration with full-rank, vanilla low-rank and BOOST's weights."""

    preset: str
    tensor: int
    pipeline: int
    fullrank: float
    vanilla: float
    btp: float


RUNS = (
    Published("3b", 2, 1, 1.14, 1.41, 0.78),
    Published("7b", 4, 1, 1.06, 1.64, 0.72),
    Published("13b", 4, 2, 2.07, 2.42, 1.30),
    Published("30b", 4, 4, 2.43, 2.58, 1.27),
)


def planned(run: Published, strategy: str) -> float:
    # Putting projections of one input together is BOOST's; its vanilla has a pair of collectives for each projection.
    parallelism = {
        "tensor_parallel_size": run.tensor, "pipeline_parallel_size": run.pipeline, "strategy": strategy,
        "group_projections": strategy != "vanilla",
    }  # fmt: skip
    spec = JobSpec.model_validate(
        {
            "name": "published",
            "model": {
                "preset": run.preset, "family": "dense" if strategy == "fullrank" else "svd", "vocab_size": 32_000,
            },
            "parallelism": parallelism,
            "training": {
                "steps": 1, "sequence_length": 4096, "micro_batch_size": 4, "precision": "bf16",
                "global_batch_size": 4 * 2 * run.pipeline if run.pipeline > 1 else 4,
            },
            "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
        }
    )  # fmt: skip
    return step_seconds(spec, Layout.of(spec.parallelism))


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.preset)
def test_boost_comes_first_by_about_as_much_as_it_did(run: Published) -> None:
    fullrank, vanilla, btp = (planned(run, strategy) for strategy in ("fullrank", "vanilla", "btp"))
    assert btp < min(vanilla, fullrank)
    assert vanilla / btp == pytest.approx(run.vanilla / run.btp, rel=0.16)
    # Taken at one rate for all products, though those of whole matrices reach more.
    assert run.fullrank / run.btp < fullrank / btp < 1.4 * run.fullrank / run.btp


@pytest.mark.parametrize("run", RUNS[1:3], ids=lambda run: run.preset)
def test_vanilla_comes_after_full_rank_where_attention_on_every_rank_outweighs_what_low_rank_saves(
    run: Published,
) -> None:
    assert planned(run, "vanilla") > planned(run, "fullrank")


def test_vanilla_at_7b_takes_as_much_longer_than_boost_as_it_did() -> None:
    run = next(run for run in RUNS if run.preset == "7b")
    assert planned(run, "vanilla") / planned(run, "btp") == pytest.approx(run.vanilla / run.btp, rel=0.02)
