"""Export of a checkpoint as a model for Hugging Face's tools, without holding the model in memory.

The checkpoint's files are read once, from start to end, and verified along the way; each box of a weight is written to
its place in the model's files as it arrives. So at any time, memory holds only one box, both as stored and as a tensor,
and one weight of the model.
"""

import json
import logging
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import fsspec
import torch
import yaml
from huggingface_hub import HfApi, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch.distributed.checkpoint.planner import ReadItem

from boost_core.architecture import is_dense, is_low_rank, parameter_count
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import Manifest
from boost_core.checkpoint.resharding import LoadChunks, load_alone
from boost_core.config import Activation, Layout, ModelConfig
from boost_core.config.base import refuse_unserved
from boost_core.config.training import DataConfig
from boost_core.convert.model_folder import published_slots, removal_named
from boost_core.convert.published_config import MODELING, TrainedOn, published_config
from boost_core.data.tokenizers import ExportedTokenizer, TokenizerDiffers, job_tokenizer
from boost_core.temporary import TemporaryFolder

# Destinations of exported models: folders, S3 and hubs. Models are staged locally and appear once complete.


_STAGING = ".export-"  # begins the names of folders that an export needs while it lasts


class HubRefused(OSError):
    """A hub is unavailable, or does not accept a model."""


class Destination:
    """A folder or S3 prefix for an exported model.

    Args:
        url: A path, ``file://`` or ``s3://`` URL at which nothing exists yet.

    Raises:
        ValueError: The URL has another form, or something exists there.
    """

    def __init__(self, url: str) -> None:
        self.url = refuse_unserved(url).rstrip("/")
        self._filesystem, self._path = fsspec.url_to_fs(self.url, use_listings_cache=False)
        self._is_local = self._filesystem.protocol[0] == "file"
        if self._filesystem.isfile(self._path):
            raise ValueError(f"{self.url} is a file; give a new folder")
        self._is_new = not self._filesystem.exists(self._path)
        self._refuse_filled(_STAGING)

    def _refuse_filled(self, own: str) -> None:
        """Refuse a folder that has more than what begins with ``own``."""
        there = [] if self._is_new else self._filesystem.ls(self._path, detail=False)
        if other := next((name for name in map(os.path.basename, there) if not name.startswith(own)), None):
            raise ValueError(f"{self.url} is not empty (it has {other}); give a new folder")

    @contextmanager
    def staging(self, needed: int) -> Iterator[Path]:
        """A local folder to write the model to, removed at the end unless it has been published.

        Args:
            needed: Size of the model in bytes.

        Raises:
            OSError: There is not enough room.
            ValueError: Another export writes there.
        """
        parent = Path(tempfile.gettempdir())
        if self._is_local:  # in the existing folder, which may be a separate file system, or next to the new one
            parent = Path(self._path).parent if self._is_new else Path(self._path)
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OSError(f"{parent} has {free / 1e9:,.3f} GB free; the export takes {needed / 1e9:,.3f} GB; make room")
        with TemporaryFolder(_STAGING, parent) as folder:  # which removes what killed exports have left there
            self._refuse_filled(folder.name)
            yield folder

    def publish(self, folder: Path) -> Path:
        """Make a staged model appear at its destination; return a local folder that contains it.

        Raises:
            OSError: It cannot be written, or something has appeared there.
        """
        if self._is_local and self._is_new:
            folder.chmod(0o755)  # temporary folders are readable by their owner only
            try:
                return folder.rename(self._path)
            except OSError as error:
                raise OSError(f"{self.url} cannot be made: {error.strerror}; give a new folder") from error
        # config.json, which marks the folder as a model, comes last.
        for file in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            if self._is_local:
                file.rename(f"{self._path}/{file.name}")
            else:
                self._filesystem.put_file(str(file), f"{self._path}/{file.name}")
        return Path(self._path) if self._is_local else folder


class Hub:
    """A repository on a hub with Hugging Face's protocol; ``huggingface_hub`` determines the address and token.

    Args:
        repository: Its name, such as ``team/model``. If it does not exist, it is created as a private one.

    Raises:
        HubRefused: The hub is unavailable, or does not allow writing to it.
        ValueError: The name is invalid.
    """

    def __init__(self, repository: str) -> None:
        self._api = HfApi(library_name="boost-service")
        with self._in_words(repository):
            self.repository = self._api.create_repo(repository, private=True, exist_ok=True).repo_id

    def push(self, folder: Path, message: str) -> str:
        """Upload a model in place of one that an earlier export left there; return the commit's URL.

        A tokenizer is replaced by another one only.

        Raises:
            HubRefused: The hub is unavailable, or does not accept it.
        """
        replaced = _WEIGHTS + (_OF_TOKENIZERS if (folder / _OF_TOKENIZERS[0]).exists() else [])
        with self._in_words(self.repository):
            pushed = self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, commit_message=message, delete_patterns=replaced
            )
        return str(pushed.commit_url)

    @contextmanager
    def _in_words(self, repository: str) -> Iterator[None]:
        try:
            yield
        except HFValidationError as error:
            raise ValueError(f"--push {repository}: {error}") from error
        except HfHubHTTPError as error:
            reason = " ".join((error.server_message or str(error)).split())
            raise HubRefused(f"the hub at {self._api.endpoint} refuses {repository}: {reason}") from error
        except Exception as error:  # from the underlying HTTP library, which differs between versions
            raise HubRefused(f"the hub at {self._api.endpoint} does not answer: {error}; try again later") from error


# Conversion of a linear low-rank model to a dense one by multiplying out its products.
#
# Shape suffixes: d input width, r rank, f output width.

_ROWS = 1024  # rows of a product computed at a time


def merged_model(model: ModelConfig) -> ModelConfig:
    """The dense model that computes the same function as a linear low-rank one.

    Raises:
        ValueError: The model is already dense, or more than a product joins its factors.
    """
    if model.rank is None:
        raise ValueError("the model is dense already; export it without --merge")
    if not is_low_rank(model):
        problem = "projections that are more than a product of two factors, so they cannot be multiplied out"
        raise ValueError(f"family={model.family} has {problem}; export it without --merge")
    if model.bottleneck_activation is not Activation.LINEAR:
        problem = "a SiLU between the two factors of a projection, so there is no product to multiply out"
        raise ValueError(f"family={model.family} has {problem}; export it without --merge")
    gate = model.mlp_activation is not Activation.LINEAR
    dense = {"family": "dense", "rank": None, "gate_activation": gate, "preset": None}
    return ModelConfig.model_validate(model.model_dump() | dense)


# The model card of an exported model: a README.md in the format that hubs display.

# Sections of the job that determined the model; those about where things are stored are left out.
_SECTIONS = ("model", "data", "training", "optimizer", "parallelism")


def model_card(manifest: Manifest, model: ModelConfig, how: "Export") -> str:
    """The card's content.

    Args:
        manifest: The checkpoint's manifest.
        model: The model that was trained.
        how: Options of the export.
    """
    about = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["boost", model.family]}
    multiplied = ", multiplied out" if how.merge else ""
    rank = "" if model.rank is None else f" with bottlenecks of rank {model.rank}{multiplied}"
    trust = "" if how.merge or is_dense(model) else ", trust_remote_code=True"
    tokens = manifest.samples * manifest.sequence_length
    facts = {
        "checkpoint": f"step {manifest.step}, {manifest.saved_at:%Y-%m-%d %H:%M} UTC",
        "trained on": f"{tokens:,} tokens, in sequences of {manifest.sequence_length:,}",
        **{f"{part} loss": f"{loss:.4f} nats a token" for part, loss in how.losses.items()},
        **how.scores,
        "layout": str(Layout.of(manifest.parallelism)),
        "written by": ", ".join(f"{package} {version}" for package, version in manifest.versions.items()),
    }
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    job = {section: manifest.job[section] for section in _SECTIONS if section in manifest.job}
    return f"""---
{yaml.safe_dump(about, sort_keys=False)}---

# {manifest.job.get("name", "model")}

A {model.family} decoder of {parameter_count(model):,} parameters{rank}, trained by BOOST Service.

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH"{trust})
tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})
```

The job:

```yaml
{yaml.safe_dump(job, sort_keys=False)}```
"""


# Safetensors files that are filled in any order, without holding the model in memory.
#
# The library can only write a file from tensors that all exist. Here a file is laid out first, according to the format
# (https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, the tensors), and its tensors are
# views of the memory-mapped file.

INDEX = "model.safetensors.index.json"
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


class TensorFiles:
    """The safetensors of a model, in as many files as needed, with an index if there are several.

    Args:
        folder: The folder for the files, which has none yet.
        model: The model.
        dtype: Type of all tensors, fp32 or bf16.
        max_shard_size: Maximum size of a file, such as ``5GB``, unless a single tensor is larger.

    Attributes:
        slots: What each tensor is of the trainer's weights, by name.
        tensors: The tensors, initially zero; writing to them writes to the files.

    Raises:
        OSError: There is not enough room for all of them.
    """

    def __init__(self, folder: Path, model: ModelConfig, dtype: torch.dtype, max_shard_size: str) -> None:
        self.slots = published_slots(model)
        shapes = {name: slot.published_shape for name, slot in self.slots.items()}
        sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
        split = split_state_dict_into_shards_factory(
            sizes, get_storage_size=int, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        self.tensors: dict[str, torch.Tensor] = {}
        self._memory: dict[str, mmap.mmap] = {}
        for file, names in split.filename_to_tensors.items():
            entries, end = dict[str, object](__metadata__={"format": "pt"}), 0
            for name in names:
                begin, end = end, end + sizes[name]
                entries[name] = {"dtype": _NAMES[dtype], "shape": shapes[name], "data_offsets": (begin, end)}
            header = json.dumps(entries).encode()
            header += b" " * (-len(header) % _ALIGNMENT)
            with (folder / file).open("x+b") as stream:
                stream.write(len(header).to_bytes(8, "little") + header)
                stream.flush()
                begin = stream.tell()
                # Allocated in full now: a disk that fills up while mapped memory is written would kill the process.
                os.posix_fallocate(stream.fileno(), 0, begin + end)
                memory = mmap.mmap(stream.fileno(), 0)
            for name in names:
                flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shapes[name]), offset=begin)
                self.tensors[name], self._memory[name] = flat.view(shapes[name]), memory
                begin += sizes[name]
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (folder / INDEX).write_text(json.dumps(index, indent=2))

    def release(self, name: str) -> None:
        """Free the memory of a tensor's file until it is used again."""
        self._memory[name].madvise(mmap.MADV_DONTNEED)

    def flush(self) -> None:
        """Wait until everything has been written to disk.

        Raises:
            OSError: Writing to the disk failed.
        """
        for memory in set(self._memory.values()):
            memory.flush()


logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_SHARD_SIZE = "5GB"
# What an earlier export may have left in a repository: transformers takes a model.safetensors before any index.
_WEIGHTS = ["model.safetensors", "model-*.safetensors", INDEX, MODELING]
_OF_TOKENIZERS = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
]  # fmt: skip
_SMALL_FILES = 2**20  # bytes reserved for files other than tensors and tokenizer


@dataclass(frozen=True)
class Export:
    """Options of an export.

    Attributes:
        dtype: Type of the tensors.
        max_shard_size: Maximum size of a file, such as ``5GB``.
        merge: Whether to multiply out low-rank products.
        tokenizer: Path or URL of the tokenizer, if it is not where the job says.
        losses: The losses that the job last reported, in nats per token by kind (training, validation), for the model
            card; empty if only the checkpoint is known.
        scores: The checkpoint's scores on tasks, as text by task and metric, also for the card.
    """

    dtype: torch.dtype = torch.float32
    max_shard_size: str = MAX_SHARD_SIZE
    merge: bool = False
    tokenizer: str | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=dict)


def export_model(folder: CheckpointFolder, step: int, destination: Destination, how: Export, hub: Hub | None) -> None:
    """Export a checkpoint's model.

    Args:
        folder: The job's checkpoints.
        step: Step of the checkpoint.
        destination: Where to write the model.
        how: Options.
        hub: The repository to push it to afterwards, if any.

    Raises:
        CheckpointDamaged: The checkpoint is not what was written; nothing is exported.
        CheckpointRemoved: The checkpoint was removed meanwhile; nothing is exported.
        ValueError: This version does not support the model, no class computes it, it cannot be merged, or the tokenizer
            is another model's.
        OSError: The checkpoint cannot be read, or the destination or the hub does not accept the model.
    """
    manifest = folder.manifest(step)
    model = manifest.read_model()
    exported = merged_model(model) if how.merge else model
    tokenizer, about = trained_on(manifest, model, how.tokenizer)
    files_of_model = model_files(exported, about, how.dtype)
    factors = 4 * parameter_count(model) if how.merge else 0
    besides = _SMALL_FILES + (len(tokenizer.content) if tokenizer else 0)
    needed = parameter_count(exported) * how.dtype.itemsize + factors + besides
    with destination.staging(needed) as staged:
        with removal_named(folder, step), ExitStack() as stack:
            beside = stack.enter_context(TemporaryFolder(_STAGING, staged.parent)) if how.merge else staged
            trained = TensorFiles(beside, model, torch.float32 if how.merge else how.dtype, how.max_shard_size)
            load_alone(folder, manifest, _FillFiles(trained))
            trained.flush()
            if how.merge:
                dense = TensorFiles(staged, exported, how.dtype, how.max_shard_size)
                for name, weight_fd in dense.tensors.items():
                    projection, used = name.removesuffix(".weight"), [name]
                    if name in trained.tensors:
                        weight_fd.copy_(trained.tensors[name])
                    else:  # summed in fp64, so that it is rounded only once, to the tensor's type
                        used = [f"{projection}.cola_a", f"{projection}.cola_b"]
                        down_dr, up_rf = (trained.tensors[factor] for factor in used)
                        down_rd, columns = down_dr.double().T, torch.split(up_rf, _ROWS, dim=1)
                        for rows_fd, columns_rf in zip(torch.split(weight_fd, _ROWS), columns, strict=True):
                            rows_fd.copy_(columns_rf.double().T @ down_rd)
                    for factor in used:
                        trained.release(factor)
                    dense.release(name)
                dense.flush()
        generation = dict.fromkeys(("eos_token_id", "pad_token_id"), about.end_of_document)
        texts = {
            **(tokenizer.files(manifest.sequence_length) if tokenizer else {}),
            "generation_config.json": json.dumps(generation, indent=2),
            "README.md": model_card(manifest, model, how),
            **files_of_model,
        }
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
        local = destination.publish(staged)
        if hub is not None:
            hub.push(local, f"{manifest.job.get('name', 'model')}, step {step}")


def model_files(model: ModelConfig, about: TrainedOn, dtype: torch.dtype) -> dict[str, str]:
    """The files that say which class computes a model, including the class if it is ours: content by file name."""
    config = published_config(model, about, str(dtype).removeprefix("torch."))
    code = {} if is_dense(model) else {MODELING: files("boost_core.convert").joinpath(MODELING).read_text("utf-8")}
    return code | {"config.json": json.dumps(config, indent=2)}


def trained_on(manifest: Manifest, model: ModelConfig, name: str | None) -> tuple[ExportedTokenizer | None, TrainedOn]:
    """The tokenizer that a checkpoint's model was trained with, and what users of the model need to know.

    The tokenizer is ``None``, with a warning, if the job's is gone.

    Raises:
        ValueError: The tokenizer is another model's, or the given file is not a tokenizer.
        OSError: The given file cannot be read.
    """
    try:
        tokenizer = job_tokenizer(DataConfig.model_validate(manifest.job["data"]), model, name)
        return tokenizer, TrainedOn(manifest.sequence_length, tokenizer.end_of_document)
    except TokenizerDiffers:
        raise
    except Exception as error:  # a store's client raises errors of its own
        if name is not None:
            raise
        logger.warning(
            "the export gets no tokenizer and no eos_token_id, because the job's cannot be read (%s); give it with "
            "--tokenizer", error,
        )  # fmt: skip
        return None, TrainedOn(manifest.sequence_length, None)


class _FillFiles(LoadChunks):
    """Fills tensors in files, which occupy memory only while they are written to."""

    def __init__(self, into: TensorFiles) -> None:
        chunks = {name: slot.chunk(into.tensors[name]) for name, slot in into.slots.items()}
        super().__init__(chunks.values())
        self._into, self._published = into, {chunk.index: name for name, chunk in chunks.items()}

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:  # noqa: ARG002
        """Release the tensor's memory, leaving it to the system to write it to disk."""
        self._into.release(self._published[read_item.dest_index])
