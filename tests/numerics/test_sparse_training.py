"""Training with sparse attention: alike however the model is split and whatever is computed again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from boost_core.config import JobSpec
from boost_core.context import sparse
from boost_core.context.sparse import find_lines
from boost_core.context.sparse_parallel import SparseIndex
from boost_core.data.corpus import EvaluationSet, Sequences, TokenStream
from boost_core.messages import Fault, FaultReport, Report, StepReport
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.train import loop
from boost_core.train.loop import evaluate, train
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from boost_core.train.step_graph import obstacle
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU, LENGTH, VOCABULARY, END, BATCH, LAYERS = torch.device("cpu"), 512, 320, 0, 2, 4
SHORTEST = 256
SPARSE = {"kind": "vertical_slash", "budget": 0.45, "sink": 2, "window": 1, "from_length": SHORTEST}
FAMILIES: dict[str, dict[str, Any]] = {
    "cola": {"family": "cola", "num_key_value_heads": 2},
    "lax": {"family": "lax", "lax": {"gate": "tensor"}, "qk_norm": True},
    "dense": {"family": "dense", "rank": None},
    "vanilla": {"family": "svd"},
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    family: str
    apart: bool
    recompute: str = "none"
    tensor: int = 1
    precision: str = "fp32"
    context: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"

    def spec(self, attention: dict[str, Any] | None) -> JobSpec:
        shape = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "rank": 8,
        }  # fmt: skip
        how: dict[str, Any] = {
            "tensor_parallel_size": self.tensor, "context_parallel_size": self.context, "recompute": self.recompute,
            "pipeline_parallel_size": self.pipeline, "pipeline_schedule": self.schedule, "zero_stage": 0,
        }  # fmt: skip
        if self.family == "vanilla":
            how["strategy"] = "vanilla"
        return JobSpec.model_validate(
            {
                "name": "sparse",
                "model": shape | FAMILIES[self.family],
                "parallelism": how,
                "data": {"documents_apart": self.apart},
                "training": {
                    "steps": 3, "sequence_length": LENGTH, "global_batch_size": BATCH, "micro_batch_size": 1,
                    "seed": 5, "precision": self.precision, "attention": attention,
                },
            }
        )  # fmt: skip


class Drawn:
    """Sequences of random tokens, in which documents end after 300 and after 380."""

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(4).integers(1, VOCABULARY, (BATCH, LENGTH + 1))
        self.tokens[:, [299, 379]] = END

    def sequences(self, _first: int, _count: int) -> Sequences:
        return self.tokens


@dataclass(frozen=True)
class Found:
    """A rank's step: loss, norm, its part of each gradient, validation, recall and density; how often was chosen."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    validation: float
    recall: float | None
    density: float | None
    chosen: int


def stepped(case: Case, attention: dict[str, Any] | None) -> Found:
    with (
        patch.dict(COMPUTE_TYPES, {"fp32": torch.float64}),
        patch.object(sparse, "find_lines", side_effect=find_lines) as find,
        patch.object(SparseIndex, "find", autospec=True, side_effect=SparseIndex.find) as find_together,
    ):
        state, drawn = TrainState.initial(case.spec(attention), CPU, end_of_document=END), Drawn()
        result = training_step(state, drawn)  # type: ignore[arg-type]
        chosen = find.call_count + find_together.call_count
        gradients = {
            name: each.clone() for group in state.optimizer.groups for name, each in group.summed_gradients().items()
        }
        kept = EvaluationSet.of([(TokenStream([drawn.tokens.flatten().astype(np.uint16)]), 1.0)], LENGTH, 2)
        tally, validation = state.partitioner.tally, evaluate(state, kept).loss
        assert find.call_count + find_together.call_count == chosen
    return Found(result.loss, result.gradient_norm, gradients, validation, tally.recall, tally.density, chosen)


SOME = [
    Case("cola", True, "latent"), Case("lax", True, "latent", tensor=2), Case("dense", False, "full", tensor=2),
    Case("cola", True, "latent", context=2), Case("cola", False, "shared", tensor=2, context=2),
    Case("cola", True, "latent", pipeline=2, schedule="zero_bubble"),
]  # fmt: skip
MORE = [
    Case("cola", False, "full", tensor=2), Case("lax", False, "full"), Case("vanilla", True, tensor=2),
    Case("lax", False, "full", context=4), Case("dense", True, context=2),
    Case("lax", False, "full", pipeline=2, schedule="interleaved_1f1b"), Case("dense", True, pipeline=2, context=2),
    Case("cola", False, "shared", tensor=2, pipeline=2),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", [*SOME, *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE)], ids=str)
def test_a_step_is_that_of_one_rank_that_recomputes_nothing(ranks: Ranks, case: Case) -> None:
    """In fp64, to 1e-10; and what is seen is chosen once for each layer and long document, and not for validation."""
    (expected,) = ranks.run(1, stepped, Case(case.family, case.apart), SPARSE)
    found = ranks.run(case.tensor * case.context * case.pipeline, stepped, case, SPARSE)
    for one in found:
        assert (one.loss, one.norm) == pytest.approx((expected.loss, expected.norm), rel=1e-10)
        assert one.chosen == LAYERS // case.pipeline * BATCH
        assert one.recall and one.density and one.density <= 0.46 and one.recall > one.density
        if case.tensor == case.pipeline == 1:  # otherwise only of its own heads and layers
            assert (one.recall, one.density) == pytest.approx((expected.recall, expected.density), rel=1e-9)
    for name, true_gradient in expected.gradients.items():
        (stage, *_) = (rank for rank, one in enumerate(found) if name in one.gradients)
        parts = [one.gradients[name] for one in found[stage : stage + case.tensor]]
        split = [axis for axis in range(parts[0].ndim) if parts[0].shape[axis] != true_gradient.shape[axis]]
        whole = torch.cat(parts, split[0]) if split else parts[0]
        assert (whole - true_gradient).norm() <= 1e-10 * true_gradient.norm(), name


@pytest.mark.full
def test_documents_below_from_length_are_attended_to_densely(ranks: Ranks) -> None:
    case = Case("cola", True)
    (dense,) = ranks.run(1, stepped, case, None)
    (sparse_,) = ranks.run(1, stepped, case, SPARSE)
    (none_as_long,) = ranks.run(1, stepped, case, SPARSE | {"from_length": LENGTH})
    assert none_as_long.loss == pytest.approx(dense.loss, rel=1e-12)
    assert (none_as_long.recall, dense.recall, dense.chosen) == (None, None, 0)
    assert abs(sparse_.loss - dense.loss) > 1e-7
    assert sparse_.norm != pytest.approx(dense.norm, rel=1e-6)


def learned(attention: dict[str, Any] | None) -> float:
    """The loss after some steps on tokens of which each tells the next."""
    spec = Case("cola", False, precision="bf16").spec(attention)
    state = TrainState.initial(spec, CPU, end_of_document=END)
    state.draw()
    losses = [training_step(state, Counting()).loss for _ in range(3)]  # type: ignore[arg-type]
    return losses[-1]


class Counting:
    def sequences(self, first: int, count: int) -> Sequences:
        begins = np.arange(first, first + count)[:, None] * 37
        return (begins + 7 * np.arange(LENGTH + 1)) % (VOCABULARY - 1) + 1


def test_a_few_steps_learn_what_dense_ones_do(ranks: Ranks) -> None:
    sparse_loss, dense_loss = (ranks.run(1, learned, attention)[0] for attention in (SPARSE, None))
    assert sparse_loss == pytest.approx(dense_loss, rel=5e-3)


def reported(corpus: Path, checkpoints: Path) -> list[Report]:
    """What a job of three steps reports that wants to lose nothing."""
    training = {
        "steps": 3, "sequence_length": 256, "global_batch_size": 1, "micro_batch_size": 1, "evaluate_sequences": 1,
        "attention": SPARSE | {"recall": 1.0},
    }  # fmt: skip
    spec = tiny_job(corpus, checkpoints, training=training, parallelism={"tensor_parallel_size": 1})
    found = list[Report]()

    class Reports:
        def report(self, report: Report) -> None:
            found.append(report)

    with patch.object(loop, "RECENT_STEPS", 2):
        train(spec, Reports())
    return found


@pytest.mark.full
def test_a_job_reports_what_it_keeps_and_that_this_is_less_than_wanted(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(1, reported, write_corpus(tmp_path / "corpus"), tmp_path / "checkpoints")
    steps = [report for report in found if isinstance(report, StepReport)]
    faults = [report for report in found if isinstance(report, FaultReport)]
    assert all(step.attention_density and step.attention_density <= 0.45 for step in steps)
    assert all(step.attention_recall and step.attention_density < step.attention_recall < 1 for step in steps)
    assert [(fault.what, fault.step) for fault in faults] == [(Fault.RECALL, 2)]


def test_its_steps_are_not_captured() -> None:
    assert obstacle(Case("cola", False).spec(None), torch.device("cuda")) is None
    cause = obstacle(Case("cola", False).spec(SPARSE), torch.device("cuda"))
    assert cause and "chosen on the host" in cause


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"parallelism": {"context_parallel_size": 2, "context": {"exchange": "latents"}}},
            "sends each head's keys by themselves, but heads share their latents; use auto or keys",
        ),
        ({"parallelism": {"split_micro_batch": True}}, "the halves of split_micro_batch use dense attention"),
        ({"model": {"sliding_window": 16}}, "model.sliding_window=16 already says what each query sees"),
        ({"training": {"cuda_graphs": "on"}, "resources": {"gpus_per_worker": 1}}, "which cannot be captured"),
        ({"training": {"sequence_length": 255}}, "from_length=256 is above training.sequence_length=255"),
        ({"training": {"attention": SPARSE | {"window": 100}}}, r"alone take \d+ pairs .* budget=0.45 allows 14803"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], says: str) -> None:
    training = {"attention": SPARSE, "sequence_length": LENGTH} | changes.get("training", {})
    parallelism = {"tensor_parallel_size": 1} | changes.get("parallelism", {})
    with pytest.raises(ValueError, match=says):
        tiny_job(Path("corpus"), "checkpoints", **(changes | {"training": training, "parallelism": parallelism}))
