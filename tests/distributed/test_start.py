"""The weights that training starts from: drawn only where there is nothing to load, and the same in any layout."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from boost_core.parallel.shard import allocate_weights
from boost_core.train import state
from boost_core.train.state import TrainState
from tests.distributed.recording import losses, train_and_record
from tests.distributed.whole import whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU = torch.device("cpu")


def both(spec: Any) -> bool:
    """Whether drawing into memory that held poison gives the masters and weights that drawing at once gives."""
    drawn = TrainState.initial(spec, CPU)
    with patch("boost_core.parallel.shard.torch.empty", lambda shape, **_: torch.full(shape, float("nan"))):
        later = TrainState.initial(spec, CPU, allocate_weights)
    later.draw()
    weights = zip(later.model.parameters(), drawn.model.parameters(), strict=True)
    whole, expected = whole_tensors(later), whole_tensors(drawn)
    return (
        all(torch.equal(mine, theirs) for mine, theirs in weights)
        and whole.keys() == expected.keys()
        and all(torch.equal(whole[name], expected[name]) for name in expected)
    )


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ({"tensor_parallel_size": 2}, "fp32"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 2, "zero_stage": 1}, "bf16"),
        ({"tensor_parallel_size": 1, "data_parallel_size": 2, "zero_stage": 2}, "fp32"),
    ],
)
def test_the_weights_are_those_of_any_start(ranks: Ranks, layout: dict[str, int], precision: str) -> None:
    spec = tiny_job(Path("unused"), "unused", parallelism=layout, training={"precision": precision})
    assert ranks.run(2, both, spec) == [True, True]


def draws(spec: Any) -> tuple[int, dict[int, float]]:
    """Weights drawn by a run of a job, and its losses."""
    with patch.object(state, "initialize_", wraps=state.initialize_) as drawn:
        reports = train_and_record(spec)
    return drawn.call_count, losses(reports)


def test_nothing_is_drawn_where_a_checkpoint_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")

    def job(steps: int, folder: str) -> Any:
        return tiny_job(corpus, tmp_path / folder, parallelism={"tensor_parallel_size": 1}, training={"steps": steps})

    (count, first), (again, second) = (ranks.run(1, draws, job(steps, "halves"))[0] for steps in (3, 6))
    assert count > 0
    assert again == 0
    assert first.keys() | second.keys() == set(range(1, 7))
    assert ranks.run(1, draws, job(6, "halves")) == [(0, {})]  # nothing is left to train
    with pytest.raises(ValueError, match=r"step-00000006 is past training\.steps=5; set training\.steps to 6 or more"):
        ranks.run(1, draws, job(5, "halves"))
