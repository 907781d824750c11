"""Masters and moments in the host's memory: real ranks train to the same bits, and checkpoints are as any others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.peer_memory import SnapshotStore
from boost_core.checkpoint.saver import HostCopies, Saver, SaveRequest
from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.plan import memory
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.distributed.whole import Whole, whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def losses_of(state: TrainState, steps: int) -> list[float]:
    sampler = Sampler(load_corpus(state.spec.data, 32), 32, state.spec.training.seed)
    return [training_step(state, sampler).loss for _ in range(steps)]


def trained(spec: JobSpec) -> tuple[list[float], Whole, int]:
    """Losses of four steps, what all ranks keep then, and how much of it this rank keeps on the host."""
    state = TrainState.initial(spec, CPU)
    state.draw()
    losses = losses_of(state, 4)
    tiers = [group.tier for group in state.optimizer.groups if group.tier]
    return losses, whole_tensors(state), sum(each.numel() for tier in tiers for each in tier.values())


def saved_and_continued(spec: JobSpec) -> list[float]:
    """Losses of the two steps after a checkpoint of the second."""
    state = TrainState.initial(spec, CPU)
    state.draw()
    losses_of(state, 2)
    folder = CheckpointFolder(spec.checkpoint.url)
    saver = Saver(folder, spec.checkpoint, SnapshotStore(), (), lambda: None, lambda _: None, lambda: None)
    saver.start(state.step, HostCopies(1).take(state.chunks()), None, SaveRequest(state.manifest_writer(folder)))
    assert saver.outcome(wait=True).manifest.step == 2
    return losses_of(state, 2)


def loaded_and_continued(spec: JobSpec) -> list[float]:
    state = TrainState.initial(spec, CPU)
    state.load(CheckpointFolder(spec.checkpoint.url), 2)
    return losses_of(state, 2)


def at(corpus: Path, folder: Path, share: float, zero: int, kind: str = "adamw", **training: Any) -> JobSpec:
    parallelism = {"tensor_parallel_size": 1, "data_parallel_size": 2, "zero_stage": zero, "optimizer_offload": share}
    optimizer = {"kind": kind} | ({"loro": {"exact_every_steps": 3}} if kind == "loro" else {})
    model = {"family": "svd" if kind == "loro" else "cola"}
    return tiny_job(
        corpus, folder, model=model, parallelism=parallelism, optimizer=optimizer,
        training={"micro_batch_size": 1} | training,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "zero", "share", "precision"),
    [
        ("adamw", 2, 0.6, "bf16"), ("loro", 1, 0.5, "fp32"), ("muon", 1, 0.5, "bf16"),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in (
                ("adamw", 1, 0.3, "fp32"), ("adamw", 2, 1.0, "fp32"), ("adamw", 0, 0.5, "fp32"),
                ("loro", 2, 1.0, "bf16"),
            )
        ),
    ],
)  # fmt: skip
def test_the_hosts_memory_changes_no_bit(
    ranks: Ranks, corpus: Path, tmp_path: Path, kind: str, zero: int, share: float, precision: str
) -> None:
    without, with_host = (
        ranks.run(2, trained, at(corpus, tmp_path, each, zero, kind, precision=precision)) for each in (0.0, share)
    )
    for (losses, state, none), (same_losses, same_state, away) in zip(without, with_host, strict=True):
        assert none == 0 < away
        assert same_losses == losses
        assert same_state.keys() == state.keys()
        assert all(torch.equal(same_state[name], state[name]) for name in state)


def in_small_chunks(spec: JobSpec) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("boost_core.optim.zero.STAGED_CHUNK", 128)
        patch.setattr(memory, "STAGED_CHUNK", 128)
        return trained(spec)[0]


def test_chunks_follow_one_another_through_two_buffers(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    (losses, *_), _ = ranks.run(2, trained, at(corpus, tmp_path, 0.0, 1))
    assert ranks.run(2, in_small_chunks, at(corpus, tmp_path, 0.7, 1)) == [losses, losses]


@pytest.mark.parametrize(("written", "read"), [(0.8, 0.0), (0.0, 0.8)])
def test_a_checkpoint_does_not_depend_on_where_the_state_was(
    ranks: Ranks, corpus: Path, tmp_path: Path, written: float, read: float
) -> None:
    following = ranks.run(2, saved_and_continued, at(corpus, tmp_path, written, 1))
    assert ranks.run(2, loaded_and_continued, at(corpus, tmp_path, read, 1)) == following
