"""The model of a foreign configuration; unsupported ones are refused, never replaced by the nearest supported one."""

from typing import Any

from boost_core.config.nanotron.reader import Reader

_AT = "model.model_config."
_FAMILIES = {"is_llama_config": "dense", "is_cola_llama_config": "cola"}
_RANK = 1024  # default of BOOST's CoLA class

_FIRST_WEIGHTS = {
    "dense": "all weights start with a standard deviation of 0.02 here; nanotron divides that of output projections by "
    "the root of 2 × layers",
    "cola": "the embedding and the head start with a standard deviation of 0.02 here; bottlenecks as in BOOST and CoLA",
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields that do not change the function, whatever their value: caches, token ids and kernel choices.
_WITHOUT_EFFECT = {
    "_attn_implementation", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings",
    "pad_token_id", "pretraining_tp", "use_cache", "z_loss_coefficient",
}  # fmt: skip

# Fields with the only value that matches what is computed here.
_THE_SAME_HERE: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}


def model_section(reader: Reader) -> dict[str, Any]:
    """The model that computes the same function.

    Raises:
        ValueError: Its family is not supported, or a size is missing.
    """
    family = _family(reader)
    model = {size: reader.whole(f"{_AT}{size}") for size in _SIZES}
    model["vocab_size"] = _padded_vocabulary(reader, model["vocab_size"])
    model["family"] = family
    optional = {
        "num_key_value_heads": reader.whole(f"{_AT}num_key_value_heads", None),
        "rope_theta": reader.number(f"{_AT}rope_theta", None),
        "norm_epsilon": reader.number(f"{_AT}rms_norm_eps", None),
        "tie_embeddings": reader.flag(f"{_AT}tie_word_embeddings", False) or None,
        **(_bottleneck(reader) if family == "cola" else {}),
    }
    if reader.flag(f"{_AT}rope_interleaved", False):
        remark = (
            "rotary embeddings rotate halves of a head here, not neighbours: the same except for the order of weights"
        )
        reader.note(f"{_AT}rope_interleaved", True, remark)
    _look_at_the_start(reader, family)
    _refuse_the_rest(reader)
    return model | {field: value for field, value in optional.items() if value is not None}


def _family(reader: Reader) -> str:
    markers = [name for name, value in reader.under(_AT).items() if name.startswith("is_") and value is True]
    foreign = [marker for marker in markers if marker not in _FAMILIES]
    if foreign or len(markers) > 1:
        for marker in foreign or markers:
            reader.refuse(f"{_AT}{marker}", "", f"not supported here; use {' or '.join(_FAMILIES)}")
        reader.raise_if_refused()
    for marker in markers:
        reader.take(f"{_AT}{marker}")
        return _FAMILIES[marker]
    return "cola" if {"attn_rank", "mlp_rank"} & reader.under(_AT).keys() else "dense"


def _bottleneck(reader: Reader) -> dict[str, Any]:
    older = reader.whole(f"{_AT}rank", None)  # an earlier class had a single rank
    attention, mlp = (reader.whole(f"{_AT}{name}", older or _RANK) for name in ("attn_rank", "mlp_rank"))
    for name, size in (("mlp_rank", mlp), ("rank", older or attention)):
        if size != attention:
            reader.refuse(
                f"{_AT}{name}", size, f"attention has {attention}; all bottlenecks of a model have one rank here"
            )
    _look_at_the_norm(reader)
    gated = reader.flag(f"{_AT}both_act", False)
    return {"rank": attention, "gate_activation": True if gated else None}


def _look_at_the_norm(reader: Reader) -> None:
    norm, size = reader.take(f"{_AT}rmsnorm_type", "triton"), reader.whole("parallelism.tp")
    if norm == "triton" and size > 1:
        reader.note(
            f"{_AT}rmsnorm_type", norm,
            f"under BOOST's tensor parallelism this norm is over each rank's shard alone, another function for every "
            f"parallelism.tp (here {size}); all norms here are over the whole hidden state, as BOOST's sync and online "
            f"are; compare with a run of rmsnorm_type=sync",
        )  # fmt: skip
    elif norm not in ("triton", "sync", "online"):
        reader.refuse(f"{_AT}rmsnorm_type", norm, "no such norm in BOOST; it has triton, sync and online")


def _padded_vocabulary(reader: Reader, size: int) -> int:
    """The vocabulary as nanotron pads it: rounded up so that tensor parallel ranks get equal shares."""
    multiple: int = reader.whole("parallelism.tp") * reader.whole("model.make_vocab_size_divisible_by", 1)
    padded = -(-size // multiple) * multiple
    if padded != size:
        reader.note(f"{_AT}vocab_size", size, f"model.vocab_size={padded}, to which nanotron pads it")
    return padded


def _look_at_the_start(reader: Reader, family: str) -> None:
    if (std := reader.number("model.init_method.std", None)) is not None:
        reader.note("model.init_method.std", std, _FIRST_WEIGHTS[family])
    if reader.take("model.init_method.use_mup", False):
        reader.refuse("model.init_method.use_mup", True, "maximal update parametrization is not supported here")
    if (path := reader.take("model.init_method.path", None)) is not None:
        remark = (
            "leave it out; convert these weights with `python -m boost_core.convert start` and name the result in "
            "checkpoint.weights_from of the job"
        )
        reader.refuse("model.init_method.path", path, remark)


def _refuse_the_rest(reader: Reader) -> None:
    """Refuse whatever may change the function: values other than ours and unknown fields."""
    for field, same in _THE_SAME_HERE.items():
        if (value := reader.take(f"{_AT}{field}", same)) != same:
            reader.refuse(f"{_AT}{field}", value, f"it is {str(same).lower()} here")
    if reader.flag(f"{_AT}z_loss_enabled", False):
        reader.refuse(f"{_AT}z_loss_enabled", True, "leave it out, and set training.z_loss of the job instead")
    for field, value in reader.under(_AT).items():
        if field not in _WITHOUT_EFFECT:
            remark = "not supported here, and may change what the model computes; if it does not, leave it out"
            reader.refuse(f"{_AT}{field}", value, remark)
