"""A LLaMA in nanotron's shards.

It packs query, key and value into one matrix and gate and up into another, d_out × d_in, and its rotary embedding
rotates neighbouring elements of a head, where LLaMA's published weights, and ours, rotate halves. Version 0.4 always
does so, with base 10,000; BOOST's fork and later versions have ``rope_theta``, and rotate halves unless
``rope_interleaved`` is set.
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from boost_core.architecture import grouped_projections
from boost_core.config import ModelConfig
from boost_core.convert.model_folder import Tensors
from boost_core.convert.published_config import TrainedOn, model_of, published_config

# The parts of nanotron in use, imported by working around what prevents its import.


@cache
def modules() -> SimpleNamespace:
    """Import nanotron, after which its modules can be imported as usual; the members are parts of it.

    ``tensor_metadata`` is the class of a shard's metadata, ``slices_pair`` that of the position of a part of a shard in
    the whole, and ``version`` the version of checkpoints that it writes.

    Raises:
        ValueError: nanotron is not installed.
    """
    try:
        import nanotron.distributed
    except ImportError as error:
        raise ValueError("nanotron is not installed; run: pip install 'boost-service[nanotron]'") from error
    # Its logging circularly imports its configuration, which has a placeholder meanwhile.
    placeholders: dict[str, Any] = {name: ModuleType(name) for name in ("nanotron.config", "nanotron.config.config")}
    for module in placeholders.values():
        module.LoggingArgs = object
    sys.modules.update(placeholders)
    try:
        import nanotron.logging
    finally:
        for name in placeholders:
            del sys.modules[name]
    import nanotron.config  # noqa: F401  # before its parallel layers, which import it circularly
    from nanotron.constants import CHECKPOINT_VERSION
    from nanotron.parallel.parameters import SlicesPair
    from nanotron.serialize.metadata import TensorMetadata

    return SimpleNamespace(tensor_metadata=TensorMetadata, slices_pair=SlicesPair, version=CHECKPOINT_VERSION)


CONFIG = "model_config.json"

# Under NumPy 2 nanotron writes shapes that it cannot read: (np.int64(32), 16).
_NUMPY_INTEGER = re.compile(r"np\.int64\((\d+)\)")


class _Packed(NamedTuple):
    """One of nanotron's weights.

    Attributes:
        name: Its name.
        published: The published tensors that it packs along its first axis.
        rows: Number of rows of each of them.
        split: The axis along which tensor parallel ranks split each packed part separately; ``None`` for a norm.
        turned: Number of leading parts to which a rotary embedding is applied.
    """

    name: str
    published: tuple[str, ...]
    rows: tuple[int, ...]
    split: int | None
    turned: int = 0


def read_nanotron(folder: Path) -> tuple[ModelConfig, Tensors]:
    """Read a model from nanotron's shards, written by any number of ranks, in fp32 under its published names.

    Raises:
        ValueError: The folder holds no such model, or only part of one.
    """
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        neighbours = config.pop("rope_interleaved", True)
        if not config.pop("is_llama_config"):
            raise KeyError("is_llama_config")
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{folder} holds no {CONFIG} of a nanotron LLaMA: {error!r}") from error
    model = model_of(config | {"model_type": "llama"}, CONFIG)
    published: Tensors = {}
    for packed in _packed(model):
        # The whole weight from all its shards.
        *folders, last = packed.name.split(".")
        place = (folder / "model").joinpath(*folders)
        shards = sorted(place.glob(f"model_{last}*.safetensors"))
        if not shards:
            raise ValueError(f"{place} has no shard of {packed.name}; give the folder of a whole nanotron checkpoint")
        whole, covered = torch.empty(0), 0
        for path in shards:
            try:
                with safe_open(path, framework="pt") as stream:
                    shard, metadata = cast("torch.Tensor", stream.get_tensor("data")), stream.metadata()
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}; copy it again") from error
            if not metadata or "unsharded_shape" not in metadata:
                whole, covered = shard, shard.numel()
                break
            readable = {key: _NUMPY_INTEGER.sub(r"\1", value) for key, value in metadata.items()}
            placed = modules().tensor_metadata.from_str_dict(readable)
            if path == shards[0]:
                whole = torch.empty(placed.unsharded_shape, dtype=shard.dtype)
            for pair in placed.local_global_slices_pairs:
                whole[pair.global_slices] = shard[pair.local_slices]
            covered += shard.numel()
        if covered != whole.numel():
            raise ValueError(f"shards of {packed.name} are missing in {place}; there are {len(shards)}")
        whole, rows = whole.float(), sum(packed.rows)
        if rows != len(whole):
            raise ValueError(f"{packed.name} has {len(whole)} rows and the model {rows}; {CONFIG} is another model's")
        turned = sum(packed.rows[: packed.turned])
        if neighbours and turned:  # from rotating neighbours to rotating halves
            by_neighbours = whole[:turned].view(-1, model.head_size // 2, 2, *whole.shape[1:])
            whole[:turned] = by_neighbours.transpose(1, 2).reshape(turned, *whole.shape[1:])
        published |= zip(packed.published, torch.split(whole, [*packed.rows]), strict=True)
    return model, published


def write_nanotron(
    folder: Path, model: ModelConfig, published: Tensors, trained_on: TrainedOn, tensor_parallel_size: int
) -> None:
    """Write a dense model the way ``tensor_parallel_size`` ranks of nanotron would.

    Raises:
        ValueError: The family is not dense, or the ranks do not divide the model.
    """
    if model.rank is not None:
        raise ValueError(f"nanotron's LLaMA is dense, and the model is {model.family}; export it without --nanotron")
    if without := [name for name in ("rope_scaling", "sliding_window", "qk_norm") if getattr(model, name)]:
        raise ValueError(f"nanotron's LLaMA has no {' and no '.join(without)}; export it without --nanotron")
    parts = (model.key_value_heads, model.intermediate_size, model.vocab_size)
    if any(part % tensor_parallel_size for part in parts):
        sizes = f"{parts[0]} key and value heads, an MLP of {parts[1]} and {parts[2]} tokens"
        raise ValueError(f"{tensor_parallel_size} ranks do not divide {sizes}; use fewer")
    folder.mkdir(parents=True, exist_ok=True)
    for packed in _packed(model):
        tensors = [published[name] for name in packed.published]
        for number, rows in enumerate(tensors[: packed.turned]):  # from rotating halves to rotating neighbours
            halves = rows.view(-1, 2, model.head_size // 2, *rows.shape[1:])
            tensors[number] = halves.transpose(1, 2).reshape(rows.shape)
        *folders, last = packed.name.split(".")
        place = (folder / "model").joinpath(*folders)
        place.mkdir(parents=True, exist_ok=True)
        whole, axis = torch.cat(tensors), packed.split
        if axis is None:
            save_file({"data": whole}, place / f"model_{last}.safetensors")
            continue
        nanotron, before, after = modules(), (slice(None),) * axis, (slice(None),) * (whole.ndim - axis - 1)
        for rank in range(tensor_parallel_size):
            pairs, pieces, begin, local = [], [], 0, 0
            for tensor in tensors if axis == 0 else [whole]:
                share = tensor.shape[axis] // tensor_parallel_size
                mine = (*before, slice(begin + rank * share, begin + (rank + 1) * share), *after)
                local_slices = (*before, slice(local, local + share), *after)
                pairs.append(nanotron.slices_pair(local_slices=local_slices, global_slices=mine))
                pieces.append(whole[mine])
                begin, local = begin + tensor.shape[axis], local + share
            metadata = nanotron.tensor_metadata(nanotron.version, tuple(pairs), tuple(whole.shape))
            name = f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tensor_parallel_size}.safetensors"
            save_file({"data": torch.cat(pieces, dim=axis).contiguous()}, place / name, metadata.to_str_dict())
    config = published_config(model, trained_on)
    content = {name: config[name] for name in _FIELDS} | {"is_llama_config": True, "rope_interleaved": True}
    (folder / CONFIG).write_text(json.dumps(content, indent=2))


# Fields of the published configuration that nanotron also has.
_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "hidden_act", "rope_theta", "rms_norm_eps", "tie_word_embeddings",
    "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


# The weight that each group of projections is packed into, and how many of them a rotary embedding is applied to.
_GROUPS = {
    "query_key_value": ("attn.qkv_proj", 2), "output": ("attn.o_proj", 0),
    "gate_up": ("mlp.gate_up_proj", 0), "down": ("mlp.down_proj", 0),
}  # fmt: skip


def _packed(model: ModelConfig) -> Iterator[_Packed]:
    hidden, table = (model.hidden_size,), (model.vocab_size,)
    embedding = "model.token_position_embeddings.pp_block.token_embedding.weight"
    yield _Packed(embedding, ("model.embed_tokens.weight",), table, 0)
    for layer in range(model.num_hidden_layers):
        here, there = f"model.decoder.{layer}.pp_block", f"model.layers.{layer}"
        for group in grouped_projections(model):
            if group.norm is not None:
                yield _Packed(f"{here}.{group.norm}.weight", (f"{there}.{group.norm}.weight",), hidden, None)
            (name, turned), published = _GROUPS[group.name], tuple(f"{there}.{each}.weight" for each in group.published)
            yield _Packed(f"{here}.{name}.weight", published, group.wide_outs, 1 if group.norm is None else 0, turned)
    yield _Packed("model.final_layer_norm.pp_block.weight", ("model.norm.weight",), hidden, None)
    if not model.tie_embeddings:
        yield _Packed("model.lm_head.pp_block.weight", ("lm_head.weight",), table, 0)
