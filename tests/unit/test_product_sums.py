"""Weight gradients that a GPU adds to their sums as it multiplies: on CPU by a stand-in for torch's operations."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from boost_core.data.corpus import Sampler, load_corpus
from boost_core.kernels.scaled_weight import unscale_
from boost_core.optim.zero import adds_products
from boost_core.parallel.btp import GradientSinks
from boost_core.train.state import TrainState
from boost_core.train.step import _reduced
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU = torch.device("cpu")
MICRO_BATCHES, BLOCKS = 2, 2
ADDED = {"addmm", "baddbmm"}
CHOICES = {
    "grouped": {},
    "each by itself": {"parallelism": {"group_projections": False}},
    "computed again": {"parallelism": {"recompute": "latent"}},
    "lax": {"model": {"family": "lax", "lax": {"gate": "dense"}}},
}


class AddingProducts(TorchDispatchMode):
    """Multiplies factors in 16 bits and adds to sums in fp32, as torch does on GPUs; counts operations and their bytes.

    Args:
        broken: Forget what is in the sums.
    """

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken, self.begun = broken, 0
        self.calls, self.bytes = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        name = function.overloadpacket.__name__
        if name in ADDED and function._overloadname == "dtype_out":
            sums, one, other, dtype = arguments
            out = keywords["out"]
            assert out.data_ptr() == sums.data_ptr() and sums.dtype == dtype == torch.float32
            assert one.dtype == other.dtype and one.element_size() == 2
            product = one.float() @ other.float()
            begins = keywords.get("beta", 1) == 0
            self.begun += begins
            result = out.copy_(product) if begins or self.broken else out.add_(product)
        else:
            result = function(*arguments, **keywords)
        self.calls[name] += 1
        moved = [each for each in (*arguments, result) if isinstance(each, torch.Tensor)]
        self.bytes[name] += sum(each.nbytes for each in moved)
        return result


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    yield
    adds_products.cache_clear()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(folder: Path, changes: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
    """The gradients of the last of some steps, all of the same weights."""
    spec = tiny_job(
        folder, "unused",
        parallelism={"tensor_parallel_size": 1} | changes.get("parallelism", {}), model=changes.get("model", {}),
        training={"precision": "bf16", "global_batch_size": 4},
    )  # fmt: skip
    adds_products.cache_clear()
    state, sampler = TrainState.initial(spec, CPU), Sampler(load_corpus(spec.data, 32), 32, 0)
    adds_products.cache_clear()  # this may be another process than the test's, which others use after it
    share = 4 // state.process_groups.data.size
    for _ in range(count):
        sequences = sampler.sequences(share * state.process_groups.data.rank, share)
        state.inputs.write(sequences, 1e9, (False,) * 5)
        _reduced(state, 4, 1)
    return {
        f"{index} {name}": each.clone()
        for index, group in enumerate(state.optimizer.groups)
        for name, each in ({"": group.own_gradient} if group.sharded else group.summed_gradients()).items()
    }


def unrounded(self: GradientSinks, x: Any, dy: Any, weight: Any, scale: Any) -> None:
    """As ``GradientSinks.add_product``, in fp32 throughout."""
    gradient = x.float().mT @ dy.float()
    self.add(weight, gradient if scale is None else gradient * scale.detach().float().unsqueeze(-1))
    if scale is not None:
        self.add(scale, (gradient * weight.detach().float()).sum(dim=-1))


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight's gradient, beside the gradient's largest element."""
    assert found.keys() == expected.keys()
    return max(((found[name] - each).abs().max() / each.abs().max()).item() for name, each in expected.items())


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES)
def test_sums_are_those_of_products_that_are_never_rounded(tmp_path: Path, changes: dict[str, Any]) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    with patch.object(GradientSinks, "add_product", unrounded):
        expected = steps(corpus, changes, 1)
    for count in (1, 2):  # from the second on it is known when the last gradient has come
        with AddingProducts() as adding:
            found = steps(corpus, changes, count)
        assert adding.begun > 1
        assert adding.calls["addmm"] > 1 and adding.calls["baddbmm"] > 1  # the first of each tries it out
        # Sums of 128 tokens' products, in another order, and of the scale's over a row of 24 to 192 elements more.
        assert far(found, expected) <= (128 + 192) * 2**-24
    rounded = steps(corpus, changes, 1)
    assert far(rounded, expected) > 2**-12  # what rounding to 8 bits and adding comes to


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_no_gradient_is_written_and_read_again(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")

    def of_a_step() -> tuple[Counter[str], Counter[str]]:
        with AddingProducts() as few:
            steps(corpus, {}, 2)
        with AddingProducts() as many:
            steps(corpus, {}, 3)
        return many.calls - few.calls, many.bytes - few.bytes

    with patch("boost_core.optim.zero.adds_products", lambda *_: False):
        before, bytes_before = of_a_step()
    after, bytes_after = of_a_step()
    # Query-key-value's and gate-up's down products are scaled by a norm; eight products a block and micro-batch.
    products = (8 * BLOCKS + 1) * MICRO_BATCHES  # and the head's
    assert after["addmm"] + after["baddbmm"] == products
    assert before["addmm"] + before["baddbmm"] == 0
    assert after["zero_"] == 0  # each sum begins with its first product
    multiplied = {"mm", "bmm"}
    assert sum(before[name] - after[name] for name in multiplied) == products
    # A gradient is no longer rounded by its product, scaled if a norm precedes it, taken to fp32 and added.
    assert before.total() - after.total() >= 4 * products
    assert bytes_before.total() - bytes_after.total() >= 770_304


def test_an_operation_that_is_not_right_is_not_used() -> None:
    assert not adds_products(CPU, torch.bfloat16)  # torch has none for a CPU
    adds_products.cache_clear()
    with AddingProducts(broken=True):
        assert not adds_products(CPU, torch.bfloat16)
    adds_products.cache_clear()
    with AddingProducts():
        assert adds_products(CPU, torch.bfloat16)
        assert not adds_products(CPU, torch.float32)


def replicated(folder: Path, zero_stage: int) -> tuple[float, int]:
    changes = {"parallelism": {"data_parallel_size": 2, "zero_stage": zero_stage}}
    with patch.object(GradientSinks, "add_product", unrounded):
        expected = steps(folder, changes, 2)
    with AddingProducts() as adding:
        found = steps(folder, changes, 2)
    return far(found, expected), adding.calls["addmm"]


def test_buckets_are_sent_once_they_are_unscaled(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    for difference, added in ranks.run(2, replicated, corpus, 1):
        assert difference <= (128 + 192) * 2**-24 and added > 0


def squared(folder: Path, rank: int) -> tuple[float, float, int, int, bool]:
    """A third step's norm of gradients as it reports it and as they have it, and how it was computed.

    That is: in how many parts, for how many weights as they were unscaled, and whether of each gradient once.
    """
    training = {"precision": "bf16", "global_batch_size": 4}
    spec = tiny_job(folder, "unused", training=training, model={"rank": rank})
    adds_products.cache_clear()
    with AddingProducts():
        state, sampler = TrainState.initial(spec, CPU), Sampler(load_corpus(spec.data, 32), 32, 0)
    adds_products.cache_clear()
    for index in range(3):  # of other sequences each, so that no norm is right that an earlier step has left
        state.inputs.write(sampler.sequences(4 * index, 4), 1e9, (False,) * 5)
        with AddingProducts() as adding, patch("boost_core.optim.zero.unscale_", Mock(wraps=unscale_)) as unscale:
            results, _ = _reduced(state, 4, 1)
    tensor, squares = state.process_groups.tensor, torch.zeros((), dtype=torch.float64)
    for group in state.optimizer.groups:
        if group.kind.split or tensor.rank == 0:
            squares += group.own_gradient.double().square().sum()
    unscaled = sum(call.args[-1] is not None for call in unscale.call_args_list)
    once = all(group.with_norm == len(group.own_gradient) for group in state.optimizer.groups)
    expected = tensor.all_reduce_(squares, "expected").sqrt().item()
    return results[1].item(), expected, adding.calls["linalg_vector_norm"] - unscaled, unscaled, once


@pytest.mark.full
def test_squares_are_taken_of_all_gradients_while_the_ranks_wait(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    # Rows of whole blocks of 64 have their norms as they are unscaled: gate-up's at rank 32, query-key-value's at none.
    for found, expected, _, unscaled, once in ranks.run(2, squared, corpus, 32):
        assert found == pytest.approx(expected, rel=1e-6)
        assert once and unscaled == BLOCKS
    for found, expected, parts, unscaled, once in ranks.run(2, squared, corpus, 8):
        assert found == pytest.approx(expected, rel=1e-6)
        assert once and not unscaled
        # One in each block's largest exchange, one for the rest and one for the other group, and two of these norms.
        assert parts == BLOCKS + 4
