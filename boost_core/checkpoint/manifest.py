"""What a committed checkpoint says about itself. Torch-free.

A manifest outlives the version that wrote it. So it has a format of its own, which is checked, and facts about the
model under names of its own (``model_facts``): a field of the job spec that is renamed tomorrow leaves them as they
are. The whole spec is in it, too, for people to look at; nothing reads it.
"""

import json
import zlib
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from boost_core.config import ModelConfig
from boost_core.config.base import in_lines

FORMAT = 3
OLDEST_FORMAT = 2  # it had no checksum of its own, and the model's shape in the copy of the spec alone
_CHECKSUM = "crc32"


class CheckpointDamaged(ValueError):
    """A checkpoint was committed and cannot be read any more, or not by this version."""


class _Stored(BaseModel):
    # Fields that a later version adds within a format are left alone; what must be understood gets a new format.
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class StoredFile(_Stored):
    """What was written of one file."""

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)

    def difference(self, found_bytes: int, found_crc32: int) -> str:
        """In which way a file is not this one, to be said after its name; empty if it is."""
        if found_bytes != self.bytes:
            return f"has {found_bytes} bytes of {self.bytes}"
        return "" if found_crc32 == self.crc32 else "is not what was written (CRC-32 differs)"


class WriterLayout(_Stored):
    """The layout of the gang that wrote a checkpoint; any other one loads it, too."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int = 1


class Manifest(_Stored):
    """What a committed checkpoint says about itself.

    Attributes:
        format: Of the manifest.
        step: Optimizer steps done.
        samples: The data cursor: samples of the job consumed so far.
        model: The model, as ``model_facts`` has it.
        sequence_length: Tokens of the sequences that it is trained on.
        parallelism: The layout that wrote it.
        versions: Of the packages that wrote it.
        saved_at: When it was committed.
        job: The job spec as it was, for people.
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
        """Size of all shards."""
        return sum(file.bytes for file in self.files.values())

    def read_model(self) -> ModelConfig:
        """The model.

        Raises:
            ValueError: This version knows no such model.
        """
        try:
            return ModelConfig.model_validate(self.model)
        except ValidationError as error:
            raise ValueError(
                f"the checkpoint of step {self.step} is of a model that this version cannot build: "
                f"{'; '.join(in_lines(error).splitlines())}; use the version that wrote it, "
                f"boost {self.versions.get('boost', 'unknown')}"
            ) from error


def encode(manifest: Manifest) -> bytes:
    """A manifest as it is stored: JSON with a checksum of all the rest."""
    content = manifest.model_dump(mode="json")
    return json.dumps(content | {_CHECKSUM: _checksum(content)}, indent=1).encode()


def decode(stored: bytes, step: int) -> Manifest:
    """Read what ``encode`` of this version or an older one has made.

    Args:
        stored: The file's content.
        step: The step that its folder is named after.

    Raises:
        CheckpointDamaged: It is not what was written, is of another step, or of a newer version. The message is to be
            put after the file's name.
    """
    content = _parsed(stored)
    _refuse_other_format(content.get("format"))
    found = content.pop(_CHECKSUM, None)
    # A checksum is believed wherever there is one: else a damaged format would do away with it.
    if found != _checksum(content) and (found is not None or content["format"] > OLDEST_FORMAT):
        raise CheckpointDamaged("is not what was written (its own CRC-32 differs)")
    if content["format"] == OLDEST_FORMAT:
        content |= _facts_in_the_job(content.get("job"))
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise CheckpointDamaged(f"is not a manifest: {problem['loc'][0]}: {problem['msg']}") from error
    if manifest.step != step:
        raise CheckpointDamaged(f"is of step {manifest.step}, and its folder of step {step}")
    if not all(name.isprintable() and "/" not in name for name in manifest.files):
        raise CheckpointDamaged("names files that are none of a checkpoint's")
    return manifest


def model_facts(model: ModelConfig) -> dict[str, Any]:
    """All that decides which function a model's weights compute, under the names that manifests have for it.

    The names and what they mean stay, whatever becomes of ``ModelConfig``'s. Defaults are filled in, for they may
    change; but what a model does without is left out where earlier versions knew no such thing.
    """
    later = {
        "rope_scaling": model.rope_scaling and model.rope_scaling.model_dump(),
        "sliding_window": model.sliding_window,
        "qk_norm": model.qk_norm or None,
    }
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
        "gate_activation": model.gated_by_silu,
        "tie_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "norm_epsilon": model.norm_epsilon,
    }


def _facts_in_the_job(job: Any) -> dict[str, Any]:
    """What the oldest format has nowhere but in the copy of the spec."""
    try:
        return {"model": job["model"], "sequence_length": job["training"]["sequence_length"]}
    except (KeyError, TypeError) as error:
        raise CheckpointDamaged("is not a manifest: its job lacks model or training.sequence_length") from error


def _parsed(stored: bytes) -> dict[str, Any]:
    if not stored:
        raise CheckpointDamaged("is empty")
    try:
        content = json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"is not JSON, as when it is cut off: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointDamaged("is not a manifest: it is not a JSON object")
    return content


def _refuse_other_format(found: object) -> None:
    if type(found) is not int or found < OLDEST_FORMAT:
        raise CheckpointDamaged(f"is not a manifest of format {OLDEST_FORMAT} to {FORMAT}")
    if found > FORMAT:
        raise CheckpointDamaged(f"was written by a newer version: it has format {found}, and this reads up to {FORMAT}")


def _checksum(content: dict[str, Any]) -> int:
    """CRC-32 of the content in a form that depends on what it says alone."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
