"""The manifest of a committed checkpoint. Does not import torch.

A manifest outlives the version that wrote it. So it has its own format number, which is checked, and facts about the
model under its own names (``model_facts``), which do not change if a field of the job spec is renamed. It also contains
the whole spec for people to read; the model is not read from it.
"""

import json
import zlib
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from boost_core.config import Activation, ModelConfig
from boost_core.config.base import in_lines

FORMAT = 3
OLDEST_FORMAT = 2  # had no checksum of its own, and the model's shape only in the copy of the spec
_CHECKSUM = "crc32"


class CheckpointDamaged(ValueError):
    """A committed checkpoint can no longer be read, or not by this version."""


class CheckpointUnreadable(OSError):
    """Something of a committed checkpoint cannot be read now, as all ranks know. Its store may be away."""


class _Stored(BaseModel):
    # Fields that later versions add within a format are ignored; anything that must be understood gets a new format.
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class StoredFile(_Stored):
    """The size and checksum of a file as written."""

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)

    def difference(self, size: int, crc32: int) -> str:
        """How a file differs from this one, phrased to follow its name; empty if it does not."""
        if size != self.bytes:
            return f"has {size} bytes of {self.bytes}"
        return "" if crc32 == self.crc32 else "is not what was written (CRC-32 differs)"


class WriterLayout(_Stored):
    """The layout of the gang that wrote a checkpoint; any other layout can load it, too."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int = 1


class Manifest(_Stored):
    """The description of a committed checkpoint.

    Attributes:
        format: Format number of the manifest.
        step: Number of optimizer steps done.
        samples: The data cursor: number of the job's samples consumed so far.
        model: The model, as described by ``model_facts``.
        sequence_length: Tokens per training sequence.
        parallelism: The layout that wrote it.
        versions: Versions of the packages that wrote it.
        saved_at: When it was committed.
        job: The job spec at the time, mainly for people.
        files: All other files of the checkpoint by name.
    """

    format: int = FORMAT
    step: int = Field(ge=0)
    samples: int = Field(ge=0)
    model: dict[str, Any]
    sequence_length: int = Field(ge=1)
    parallelism: WriterLayout
    versions: dict[str, str]
    saved_at: datetime
    job: dict[str, Any]
    files: dict[str, StoredFile]

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(file.bytes for file in self.files.values())

    def read_model(self) -> ModelConfig:
        """The model's configuration.

        Raises:
            ValueError: This version does not support the model.
        """
        try:
            return ModelConfig.model_validate(self.model)
        except ValidationError as error:
            raise ValueError(
                f"the checkpoint of step {self.step} is of a model that this version cannot build: "
                f"{'; '.join(in_lines(error).splitlines())}; use the version that wrote it, "
                f"boost {self.versions.get('boost', 'unknown')}"
            ) from error

    def differences(self, model: ModelConfig) -> dict[str, str]:
        """The facts of which a model has others, each by its name with both values in words.

        Raises:
            ValueError: This version does not support the checkpoint's model.
        """
        there, here = model_facts(self.read_model()), model_facts(model)
        names = [name for name in there | here if there.get(name) != here.get(name)]
        return {name: f"{name} is {there.get(name)} there and {here.get(name)} here" for name in names}

    def to_json(self) -> str:
        """The manifest with a checksum of its content."""
        content = self.model_dump(mode="json")
        return json.dumps(content | {_CHECKSUM: _checksum(content)}, indent=1)


def decode(stored: bytes, step: int) -> Manifest:
    """Read a manifest written by ``Manifest.to_json`` of this version or an older one.

    Args:
        stored: The file's content.
        step: The step that its folder is named after.

    Raises:
        CheckpointDamaged: It is not what was written, is of another step, or is from a newer version. The message is
            phrased to follow the file's name.
    """
    if not stored:
        raise CheckpointDamaged("is empty")
    try:
        content = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"is not JSON, as when it is cut off: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointDamaged("is not a manifest: it is not a JSON object")

    number = content.get("format")
    if type(number) is not int or number < OLDEST_FORMAT:
        raise CheckpointDamaged(f"is not a manifest of format {OLDEST_FORMAT} to {FORMAT}")
    if number > FORMAT:
        raise CheckpointDamaged(f"was written by a newer version: it has format {number}; this reads up to {FORMAT}")
    written = content.pop(_CHECKSUM, None)
    # A checksum is checked wherever there is one; otherwise a damaged format number could disable it.
    if written != _checksum(content) and (written is not None or number > OLDEST_FORMAT):
        raise CheckpointDamaged("is not what was written (its own CRC-32 differs)")

    if number == OLDEST_FORMAT:  # which has these facts only in its copy of the spec
        try:
            job = content["job"]
            content |= {"model": job["model"], "sequence_length": job["training"]["sequence_length"]}
        except (KeyError, TypeError) as error:
            raise CheckpointDamaged("is not a manifest: its job lacks model or training.sequence_length") from error
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointDamaged(f"is not a manifest: {problem['loc'][0]}: {problem['msg']}") from error
    if manifest.step != step:
        raise CheckpointDamaged(f"is of step {manifest.step}, but its folder is of step {step}")
    if not all(name.isprintable() and "/" not in name and name not in ("", ".", "..") for name in manifest.files):
        raise CheckpointDamaged("names files that do not belong to a checkpoint")
    return manifest


def model_facts(model: ModelConfig) -> dict[str, Any]:
    """Everything that determines the function a model's weights compute, under the manifest's names.

    The names and their meanings are fixed, however ``ModelConfig`` changes. Defaults are filled in, because they may
    change; but features unknown to earlier versions are left out if the model does not use them.
    """
    scaling = model.rope_scaling and model.rope_scaling.model_dump()
    later = {"rope_scaling": scaling, "sliding_window": model.sliding_window, "qk_norm": model.qk_norm or None}
    return {name: fact for name, fact in later.items() if fact is not None} | {
        "family": model.family,
        "lax": model.lax and {"base": model.lax.base, "gate": model.lax.gate, "chain_length": model.lax.chain_length},
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "rank": model.rank,
        "gate_activation": model.mlp_activation is not Activation.LINEAR,
        "tie_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "norm_epsilon": model.norm_epsilon,
    }


def _checksum(content: dict[str, Any]) -> int:
    """CRC-32 of the content in a canonical form."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
