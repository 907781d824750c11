"""NEST's published throughputs (arXiv 2603.06798) follow from layers and micro-batches alone: a check of arithmetic.

A step takes n · (⌈4096/dp⌉ + pp − 1), for n the most layers in a stage. The table's manual plans have a layer more than
an even cut, in their last stage. No network is in it; what that decides is in ``tests/benchmarks/planning.py``.
"""

from math import ceil
from pathlib import Path

import pytest
import yaml

from boost_core.plan.replay import StageSeconds, at_least, play

SEQUENCES = 4096
TABLE = yaml.safe_load((Path(__file__).parent / "nest_table.yaml").read_text())
FIGURES = [(model, plan) for model, entry in TABLE.items() for plan in entry["plans"]]
_PLAYED = 20_000  # passes


def step(layers: int, pipeline: int, replicas: int) -> float:
    """Of stages that all take as long as the largest, in layers."""
    stages, micro_batches = (
        [[StageSeconds(layers / 3, layers / 3, layers / 3, 0)]] * pipeline,
        ceil(SEQUENCES / replicas),
    )
    seconds = max(at_least(stages, "1f1b", micro_batches))
    if pipeline * micro_batches < _PLAYED:
        assert max(play(stages, "1f1b", micro_batches)) == pytest.approx(seconds)
    return seconds


def test_all_figures_are_there() -> None:
    assert len(FIGURES) == 56


@pytest.mark.full
@pytest.mark.parametrize(("model", "plan"), FIGURES)
def test_throughputs_are_those_that_were_published(model: str, plan: list) -> None:
    devices, planner, published, layers, pipeline, replicas = plan
    entry = TABLE[model]
    assert pipeline * replicas <= devices
    assert layers == ceil(entry["layers"] / pipeline) + (planner == "manual") or planner == "mcmc"
    assert step(*entry["baseline"]) / step(layers, pipeline, replicas) == pytest.approx(published, rel=0.007)
