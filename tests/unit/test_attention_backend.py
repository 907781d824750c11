"""Whose kernels attention runs on is chosen by us, and the last batch of an evaluation needs none of its own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

from boost_core.model import attention
from boost_core.model.attention import backends, dense_attention
from boost_core.train import loop
from boost_core.train.state import attention_backend
from tests.jobs import tiny_job

CUDNN, FLASH, EFFICIENT, MATH = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def each_asks_anew() -> Iterator[None]:
    backends.cache_clear()
    yield
    backends.cache_clear()


@pytest.mark.parametrize(("capability", "cudnn", "order"), [
    ((9, 0), True, [CUDNN, FLASH, EFFICIENT, MATH]),
    ((10, 0), True, [CUDNN, FLASH, EFFICIENT, MATH]),
    ((8, 0), True, [FLASH, CUDNN, EFFICIENT, MATH]),
    ((9, 0), False, [FLASH, EFFICIENT, MATH]),
])  # fmt: skip
def test_kernels_are_preferred_by_device(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cudnn: bool, order: list[SDPBackend]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: cudnn)
    assert backends(CUDA) == order


def test_torch_computes_with_them_and_the_record_says_with_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny_job("unused", tmp_path)
    assert attention_backend(spec, CPU) == "flash"
    x_bhse = torch.randn(1, 2, 8, 4, requires_grad=True)
    by_flash = dense_attention(x_bhse, x_bhse, x_bhse)
    assert "Flash" in by_flash.grad_fn.name()
    monkeypatch.setattr(attention, "backends", lambda _: [MATH])
    monkeypatch.setattr("boost_core.train.state.backends", lambda _: [MATH])
    by_math = dense_attention(x_bhse, x_bhse, x_bhse)
    assert "Flash" not in by_math.grad_fn.name()
    assert attention_backend(spec, CPU) == "math"
    torch.testing.assert_close(by_math, by_flash)


def test_all_batches_of_an_evaluation_have_one_shape_and_padding_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length, micro_batch, windows = 4, 4, np.arange(6 * 5).reshape(6, 5)
    shapes = []

    def losses(_state: object, sequences: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(sequences.shape)
        loss_T = torch.from_numpy(sequences[:, 1:].astype(np.float32)).flatten()
        return loss_T, loss_T % 3 > 0  # some tokens do not count

    alone = SimpleNamespace(rank=0, size=1, all_reduce_=lambda *_: None)
    state = SimpleNamespace(
        process_groups=SimpleNamespace(replicas=alone, pipeline=alone), mesh=SimpleNamespace(device=CPU),
        spec=SimpleNamespace(training=SimpleNamespace(micro_batch_size=micro_batch)),
    )  # fmt: skip
    on = SimpleNamespace(
        batches=lambda size, part, parts: (windows[begin : begin + size] for begin in range(0, 6, size)),
        windows=windows, sequence_length=length, bytes_per_token=None,
    )  # fmt: skip
    monkeypatch.setattr(loop, "losses", losses)
    went_on: list[int] = []
    result = loop.evaluate(state, on, lambda: went_on.append(len(shapes)))
    counted = windows[:, 1:][windows[:, 1:] % 3 > 0]
    assert shapes == [(micro_batch, length + 1)] * 2
    assert went_on == [0, 1, 2], "long sets are no hang"
    assert (result.tokens, result.loss) == (counted.size, counted.mean())
