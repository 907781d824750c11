"""Documents packed into one sequence that do not see each other: each has the losses that it has alone."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from boost_core.config import JobSpec, ModelConfig, ParallelismConfig
from boost_core.model import attention
from boost_core.model.attention import Rotation
from boost_core.model.decoder import Decoder, build
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.shard import make_weights
from boost_core.plan.machine import attends_on_device
from boost_core.train.batch import Batch, most_documents
from tests.numerics.lengths_on_device import lengths_on_device, masked
from tests.numerics.storages import Made

END = 0
CPU = torch.device("cpu")
LENGTHS = [[5, 1, 9], [15], [2, 2, 11]]


def network(family: str, window: int | None) -> tuple[ModelConfig, Decoder]:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 8}
    config = ModelConfig.model_validate(shape | {"family": family, "num_key_value_heads": 2, "sliding_window": window})
    decoder, axes = build(config, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    make_weights(decoder, axes, 0, 1, 7, CPU, torch.float64)
    return config, decoder


def losses(config: ModelConfig, decoder: Decoder, batch: Batch, length: int) -> torch.Tensor:
    rotation = Rotation.of(config, length, CPU)
    return decoder(batch.tokens, batch.targets, rotation.with_documents(batch.starts))


@pytest.mark.full
@pytest.mark.parametrize(("family", "window"), [("cola", None), ("lax", None), ("cola", 4)])
def test_a_packed_document_has_the_losses_that_it_has_alone(family: str, window: int | None) -> None:
    config, decoder = network(family, window)
    draw = np.random.default_rng(3)
    rows = [[[*draw.integers(1, 256, length - 1).tolist(), END] for length in row] for row in LENGTHS]
    packed = np.array([[*(token for document in row for token in document), 7] for row in rows])
    batch = Batch.of(packed, END, CPU)
    together = losses(config, decoder, batch, 15)
    place = 0
    for document in (document for row in rows for document in row):
        # The token after the last is another document's, or nobody's: its loss does not count.
        alone = Batch.of(np.array([[*document, 1]]), END, CPU)
        expected = losses(config, decoder, alone, len(document))[:-1]
        here = slice(place, place + len(document) - 1)
        torch.testing.assert_close(together[here], expected, rtol=1e-12, atol=0)
        assert batch.counts[place : place + len(document)].tolist() == [1.0] * (len(document) - 1) + [0.0]
        place += len(document)


def test_documents_that_see_each_other_are_one_sequence() -> None:
    batch = Batch.of(np.array([[3, END, 4, 5]]), None, CPU)
    assert batch.starts is None
    assert batch.counts.tolist() == [1.0, 1.0, 1.0]


CASES = [
    pytest.param([5, 1, 9], 4, 2, None, id="grouped"),
    pytest.param([16], 2, 2, 5, id="one, with a window"),
    pytest.param([2, 2, 11], 4, 1, 3, id="with a window"),
    pytest.param([3, 0, 0, 4, 0], 2, 2, None, id="places that are not taken"),
    pytest.param([7, 6], 2, 2, 6, id="as long as the window"),
    pytest.param([4, 4], 2, 2, 1, id="each sees itself"),
]


def drawn(lengths: list[int], heads: int, of_keys: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values and the gradient of what they give; and where documents begin."""
    generator = torch.Generator().manual_seed(11)
    shapes = [(sum(lengths), count, 8) for count in (heads, of_keys, of_keys, heads)]
    begin_n = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes], begin_n


def attended(by: Any, drawn: tuple[list[torch.Tensor], torch.Tensor], *others: Any) -> list[torch.Tensor]:
    """What attention gives, and the gradients of its inputs."""
    (*inputs, dy), begin_n = drawn
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = by(*inputs, begin_n, *others)
    return [out.detach(), *torch.autograd.grad(out, inputs, dy)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("lengths", "heads", "of_keys", "window"), CASES)
def test_attention_by_lengths_is_attention_behind_a_mask(
    lengths: list[int], heads: int, of_keys: int, window: int | None, on_device: bool
) -> None:
    inputs = drawn(lengths, heads, of_keys, torch.float64)
    expected = attended(masked, inputs, window)
    with lengths_on_device() if on_device else nullcontext():
        found = attended(attention.attention_within, inputs, max(lengths), window)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("lengths", "heads", "of_keys", "window"), CASES)
def test_so_it_is_in_fp32(lengths: list[int], heads: int, of_keys: int, window: int | None) -> None:
    """Sums of m terms err by m·2⁻²⁴ of their magnitudes' sum, once in scores and once in the output.

    A score is of 8 products of normal draws, scaled by 8^-½: less than 5 in size here, so that exp errs by
    (8 + 5)·2⁻²⁴; a softmax and its sum of m values below 4 by 2 m more; backward the same twice over. What is summed
    may cancel to nothing, as gradients of a query do that sees one key, so magnitudes are those of all that comes out.
    """
    exact = attended(masked, drawn(lengths, heads, of_keys, torch.float64), window)
    found = attended(attention.attention_within, drawn(lengths, heads, of_keys, torch.float32), max(lengths), window)
    bound = 2 * (8 + 5 + 2 * max(lengths)) * 4 * 2**-24
    size = max(its.abs().max() for its in exact)
    for mine, its in zip(found, exact, strict=True):
        assert (mine - its).abs().max() <= bound * size


def test_no_mask_is_of_a_whole_sequence() -> None:
    length = 256
    for lengths, window, largest in (([100, 28, 128], None, 0), ([256], 16, 16 * 31)):
        inputs, begin_n = drawn(lengths, 2, 2, torch.float32)
        with Made() as made:
            attention.attention_within(*inputs[:3], begin_n, length, window)
        masks = [size for size in made.sizes.values() if size not in {x.nbytes for x in inputs}]
        assert max(masks) < length**2
        assert largest == 0 or largest in masks


def test_documents_begin_where_one_has_ended() -> None:
    rows = np.array([[1, END, 2, 3, END, 9], [4, 5, 6, 7, 8, 9], [END, END, 1, 2, 3, 9], [1, 2, 3, 4, END, 9]])
    assert most_documents(rows, END) == 3
    assert most_documents(rows, None) == 1
    for places in (3, 5):
        batch = Batch.of_tokens(torch.from_numpy(rows), END, places)
        padded = [row + [5] * (places - 3) for row in ([0, 2, 5], [0, 5, 5], [0, 1, 2], [0, 5, 5])]
        assert batch.starts is not None and batch.starts.tolist() == padded
        ends = attention.begins(batch.starts, 5)
        lengths = [length for length in ends.diff().tolist() if length]
        assert (ends.dtype, lengths) == (torch.int32, [2, 3, 5, 1, 1, 3, 5])
        assert [part.starts.tolist() for part in batch.micro_batches(2) if part.starts is not None] == [
            padded[:2], padded[2:],
        ]  # fmt: skip
        rotation = Rotation(5, 4, 1e4, CPU).with_documents(batch.starts)
        halves = [half.begins_of(batch.tokens.view(1, -1, 1)) for _, half in rotation.splits(batch.tokens, 2)]
        assert [half.diff().count_nonzero().item() for half in halves if half is not None] == [3, 4]


@pytest.mark.parametrize(
    ("dtype", "head_size", "served"),
    [
        (torch.bfloat16, 64, True), (torch.float16, 256, True), (torch.float32, 64, False), (torch.bfloat16, 20, False),
        (torch.bfloat16, 264, False),
    ],
)  # fmt: skip
def test_what_flash_attention_serves_is_what_the_plan_captures(
    dtype: torch.dtype, head_size: int, served: bool
) -> None:
    """Of tensors that claim to be on a GPU, as no other is at hand."""
    query = SimpleNamespace(shape=(3, 2, head_size), dtype=dtype, is_cuda=True)
    assert attention.reads_lengths_on_device(cast(torch.Tensor, query)) == served
    assert not attention.reads_lengths_on_device(torch.empty(3, 2, head_size, dtype=dtype))
    precision = {torch.bfloat16: "bf16", torch.float16: "fp8", torch.float32: "fp32"}[dtype]
    spec = JobSpec.model_validate(
        {
            "name": "served", "data": {"documents_apart": True}, "training": {"precision": precision, "steps": 1},
            "model": {
                "family": "cola", "hidden_size": 2 * head_size, "num_attention_heads": 2, "num_hidden_layers": 1,
                "intermediate_size": 16, "rank": 16, "vocab_size": 256,
            },
        }
    )  # fmt: skip
    assert attends_on_device(spec) == served
    together = spec.model_copy(update={"data": spec.data.model_copy(update={"documents_apart": False})})
    assert attends_on_device(together)
