"""What to train on and how: the data, and the trajectory of steps, batches, optimizer and learning rate."""

import re
from decimal import Decimal
from itertools import pairwise
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticKnownError

from boost_core.config.base import SOURCE_SCHEMES, Config, Count, Location, Share, refuse_unserved, spelled
from boost_core.config.model import SparseAttentionConfig

BYTES = "bytes"
BYTE_TOKENS = 256

MOST_TOKENS = 1_048_576  # per sequence
_MOST_PATHS = 10_000  # over all sources
_MOST_SOURCES = 256  # each is checked and looked up before a job is accepted
MOST_VALIDATION_SETS = 8  # each adds to every evaluation, and is a series of metrics

# Number of samples after which the order of a mixture's sources repeats.
MIXTURE_PERIOD = 4096


_DATASET_NAMES = "lower-case letters, digits, dots and hyphens, at most 63, starting with a letter or digit"
DatasetName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$"), spelled(_DATASET_NAMES)]


# The most entries of a list, and what to do about more.
_MOST_ENTRIES = {
    "paths": (_MOST_PATHS, "name folders or globs instead of files"),
    "mixture": (_MOST_SOURCES, f"give at most {_MOST_SOURCES} sources"),
    "validation": (MOST_VALIDATION_SETS, f"give at most {MOST_VALIDATION_SETS} sets"),
}


def _few(value: Any, info: Any) -> Any:
    """Refuse a list that is too long, or sources with too many paths in total, with one error rather than many."""
    most, remedy = _MOST_ENTRIES[info.field_name]
    if isinstance(value, list | tuple) and len(value) > most:
        raise ValueError(f"has {len(value)} entries; {remedy}")
    if isinstance(value, list) and info.field_name != "paths":
        paths = [source.get("paths") for source in value if isinstance(source, dict)]
        count = sum(len(each) for each in paths if isinstance(each, list))
        if count > _MOST_PATHS:
            raise ValueError(f"its sources have {count} paths; give at most {_MOST_PATHS}: name folders or globs")
    return value


def _of_a_tokenizer(token: str | None, info: Any) -> str | None:
    """Refuse a token that ends a document where the tokenizer does not let the user choose it."""
    if token is not None and info.data.get("tokenizer") in (None, BYTES):
        raise ValueError("byte-level documents end with byte 0; leave end_of_document out, or give a tokenizer")
    return token


EndToken = Annotated[str | None, Field(min_length=1, max_length=256), AfterValidator(_of_a_tokenizer)]


class SourceConfig(Config):
    """Where documents come from.

    ``standard_library`` is the source text of the user's own Python installation: real input without a download. The
    other kinds take local paths, globs, folders and fsspec URLs.
    """

    kind: Literal["standard_library", "text", "jsonl", "parquet", "arrow", "dataset", "tokenized"] = Field(
        "standard_library",
        description="text: one document per file; jsonl: one per line; parquet and arrow: one per row; dataset: a "
        "Hugging Face dataset saved to disk; tokenized: the output of `boost data tokenize`.",
    )
    paths: Annotated[tuple[Location, ...], Field(fail_fast=True), BeforeValidator(_few)] = Field(
        (),
        validate_default=True,
        description="Files, folders, globs, or file://, s3:// or hf://datasets/ URLs; text and jsonl also as .gz or "
        ".zst; none for kind=standard_library.",
    )
    text_field: str = Field(
        "text", min_length=1, max_length=256, description="Field of each line or row that holds the text."
    )

    @field_validator("paths")
    @classmethod
    def _paths_go_with_the_kind(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        kind = info.data.get("kind")
        if kind not in (None, "standard_library") and not value:
            raise ValueError(f"kind={kind} needs at least one path, glob or URL in paths")
        if kind == "standard_library" and value:
            remedy = "use kind=text to train on your own files, or kind=jsonl, parquet or arrow, as they are"
            raise ValueError(f"kind=standard_library takes no paths; {remedy}")
        for path in value:
            refuse_unserved(path, SOURCE_SCHEMES)
        return value


class NamedSource(SourceConfig):
    """A source that may also be a dataset made by the service."""

    dataset: DatasetName | None = Field(
        None,
        description="Name of a dataset made by the service, instead of kind and paths; its shards are written into "
        "these and stay the same for this job.",
    )

    @field_validator("dataset")
    @classmethod
    def _dataset_is_the_source(cls, value: str | None, info: Any) -> str | None:
        if value is not None and info.data.get("kind") not in (None, "standard_library", "tokenized"):
            raise ValueError("the source has both a dataset and documents of its own; leave one out")
        return value


def _is_tokens(source: SourceConfig) -> bool:
    """Whether a source is tokens already."""
    return source.kind == "tokenized" or (isinstance(source, NamedSource) and source.dataset is not None)


class WeightedSource(NamedSource):
    """A source in a mixture."""

    weight: float = Field(
        gt=0, le=1e15, description="Share of the samples taken from this source, relative to the other weights."
    )


class ValidationSet(NamedSource):
    """A named set of text to validate on that is not trained on.

    All its documents are used; of tokenized folders, only their validation part.
    """

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$",
        description="Its name in reports and metrics: up to 32 of a-z, 0-9, _ and -.",
    )


class DataConfig(Config):
    """What to train on, and how it is tokenized."""

    source: SourceConfig | None = Field(None, description="Default: the source text of Python's standard library.")
    mixture: Annotated[tuple[WeightedSource, ...], BeforeValidator(_few)] = Field(
        (), description="Several weighted sources, instead of source."
    )
    dataset: DatasetName | None = Field(
        None,
        description="Name of a dataset made by the service, instead of source; its shards are written into source "
        "and stay the same for this job.",
    )
    validation: Annotated[tuple[ValidationSet, ...], BeforeValidator(_few)] = Field(
        (), description="Named sets to validate on, besides the part of the sources kept for validation."
    )
    tokenizer: Location | None = Field(
        None,
        description="bytes, or the path or URL of a tokenizer.json of Hugging Face's tokenizers. Default: bytes; "
        "tokenized sources come with their own.",
    )
    end_of_document: EndToken = Field(
        None,
        description="The token that ends a document; default: the tokenizer's <|endoftext|>, </s> or the like, if "
        "only one of these is a special token.",
    )
    documents_apart: bool = Field(
        False, description="Mask attention and loss across the documents packed into one sequence."
    )
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05,
        validation_alias=AliasChoices("validation_fraction", "held_out_fraction"),  # its name in old job files
        description="Share of the files kept for validation; tokenized sources are already split.",
    )

    @field_validator("mixture", "dataset", "validation", "tokenizer")
    @classmethod
    def _fields_go_together(cls, value: Any, info: Any) -> Any:
        """Check a field beside those before it, of which invalid ones are missing."""
        source, mixture, problem = info.data.get("source"), info.data.get("mixture", ()), None
        dataset, is_set = info.data.get("dataset"), value is not None
        match info.field_name:
            case "mixture":
                total = sum(each.weight for each in value)
                light = next((each.weight for each in value if each.weight * MIXTURE_PERIOD < total), None)
                if value and source is not None:
                    problem = "data has a source and a mixture; put the source into the mixture, or leave one out"
                elif light is not None:
                    problem = f"a weight of {light:g} is less than 1/{MIXTURE_PERIOD} of their sum, {total:g}; "
                    problem += "raise it, or drop its source"
                elif len({_is_tokens(each) for each in value}) > 1:
                    problem = "a mixture cannot combine tokenized sources and datasets with others; "
                    problem += "tokenize the others first"
            case "dataset" if is_set and mixture:
                problem = "data has both a dataset and a mixture; put {dataset: NAME, weight: W} into the mixture"
            case "dataset" if is_set and source is not None and not _is_tokens(source):
                problem = "data has both a dataset and its own sources; leave one out"
            case "validation":
                names = [each.name for each in value]
                kinds = {_is_tokens(each) for each in (*value, source, *mixture) if each is not None}
                if value and source is None and not mixture:
                    kinds.add(dataset is not None)  # else it is the standard library
                if twice := next((name for name in names if names.count(name) > 1), None):
                    problem = f"two sets are named {twice!r}; give each its own name"
                elif len(kinds) > 1:
                    problem = "sources and validation sets must be all tokenized, or none; tokenize the others first"
            case "tokenizer" if is_set and dataset is not None:
                problem = "datasets come with their tokenizer; leave tokenizer out"
            case "tokenizer" if is_set and any(each is not None and _is_tokens(each) for each in (source, *mixture)):
                problem = "tokenized sources and datasets come with their tokenizer; leave tokenizer out"
            case "tokenizer" if is_set and value != BYTES:
                refuse_unserved(value)
        if problem is not None:
            raise ValueError(problem)
        return value

    @property
    def sources(self) -> tuple[tuple[SourceConfig, float], ...]:
        """Every source and its weight."""
        if self.mixture:
            return tuple((source, source.weight) for source in self.mixture)
        return ((self.source or SourceConfig(), 1.0),)

    @property
    def tokenized(self) -> bool:
        """Whether the sources are tokens already."""
        return self.dataset is not None or _is_tokens(self.sources[0][0])

    @property
    def datasets(self) -> tuple[tuple[str, str, SourceConfig | None], ...]:
        """Every field that names a dataset, the name, and the source that its shards are or will be written into."""
        named = [("data", self.dataset, self.source)]
        named += [(f"data.mixture[{number}]", each.dataset, each) for number, each in enumerate(self.mixture)]
        named += [(f"data.validation[{number}]", each.dataset, each) for number, each in enumerate(self.validation)]
        return tuple((f"{field}.dataset", name, source) for field, name, source in named if name is not None)


# What a corpus is made from and how: its documents, which of them are kept, and how they are tokenized.

Measure = Literal["characters", "words", "word_length", "symbols", "letters", "repeated_lines"]
Bound = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
OnError = Literal["fail", "skip"]


class QualityFilter(Config):
    """Bounds on one measure; documents outside them are dropped."""

    measure: Measure = Field(
        description="characters or words: their number; word_length: mean characters per word; symbols: hashes and "
        "ellipses per word; letters: share of words that contain a letter; repeated_lines: share of the text's "
        "characters in lines that repeat earlier ones."
    )
    min: Bound | None = Field(None, description="Smallest value kept; null: no bound.")
    max: Bound | None = Field(None, validate_default=True, description="Largest value kept; null: no bound.")

    @field_validator("max")
    @classmethod
    def _bounds_leave_something(cls, value: float | None, info: Any) -> float | None:
        least = info.data.get("min")
        if "min" in info.data and value is None and least is None:
            raise ValueError("the filter has no bound; give min, max or both")
        if value is not None and least is not None and least > value:
            raise ValueError(f"min ({least:g}) must not exceed max ({value:g})")
        return value


class NearDedup(Config):
    """MinHash: of documents whose signatures share a band, directly or through others, only the first is kept.

    Two documents whose shingles have Jaccard similarity s share a band with probability 1 − (1 − sʳ)ᵇ, which rises
    steeply around s = (1/b)^(1/r), by default 0.72.
    """

    shingle_words: int = Field(5, ge=1, le=50, description="Consecutive words per shingle.")
    bands: int = Field(14, ge=1, le=64, description="b: bands per signature; more also match less similar documents.")
    rows: int = Field(8, ge=1, le=64, description="r: hashes per band; more match only more similar documents.")


class CorpusConfig(Config):
    """How documents become shards of tokens."""

    source: SourceConfig = Field(description="The documents.")
    tokenizer: Location = Field(BYTES, description="bytes, or the path or URL of a tokenizer.json.")
    end_of_document: EndToken = Field(
        None, description="The token that ends a document; default: the only special token of a usual name."
    )
    filters: Annotated[tuple[QualityFilter, ...], Field(max_length=16)] = Field(
        (), description="Bounds that documents must satisfy."
    )
    exact_dedup: bool = Field(
        False, description="Keep only the first of documents that are equal apart from case and white space."
    )
    near_dedup: NearDedup | None = Field(None, description="Keep only the first of documents that are nearly equal.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the shuffle of documents.")
    validation_fraction: float = Field(0.05, ge=0, lt=1, description="Share of the documents kept for validation.")
    shard_tokens: int = Field(
        1 << 28, ge=1, le=1 << 32, description="Approximate training tokens per shard; each is ordered in memory."
    )
    on_error: OnError = Field("fail", description="skip: leave out bad documents and list them in quarantine-*.jsonl.")

    @field_validator("source", "tokenizer", "filters")
    @classmethod
    def _documents_can_be_tokenized(cls, value: Any, info: Any) -> Any:
        match info.field_name:
            case "source" if value.kind == "tokenized":
                raise ValueError("kind=tokenized is tokens already; name the documents they were made from")
            case "tokenizer" if value != BYTES:
                refuse_unserved(value)
            case "filters":
                measures = [each.measure for each in value]
                if twice := next((each for each in measures if measures.count(each) > 1), None):
                    raise ValueError(f"{twice} is given twice; give one filter with min and max")
        return value


# Steps, batches, optimizer and learning rate.


class BatchStage(Config):
    """A smaller batch at the start of training."""

    until_step: int = Field(ge=1, le=100_000_000, description="The last optimizer step with this batch.")
    global_batch_size: Count = Field(description="Sequences per optimizer step.")


MOST_SAMPLINGS = 1000  # per job: each is an event that the job's page reads


class SampleConfig(Config):
    """Text that the model generates during training: for each prompt, the likeliest tokens one by one."""

    every_steps: Count = Field(description="Generate text every this many steps, and at the end.")
    prompts: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        min_length=1, max_length=4, description="Beginnings of documents."
    )
    max_new_tokens: int = Field(32, ge=1, le=64, description="Tokens per prompt; each takes a forward pass.")


_TOKENS = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) ?([KMBT])")
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class TrainingConfig(Config):
    """How long to train, on what batches, and in what precision."""

    sequence_length: int = Field(256, ge=2, le=MOST_TOKENS, description="Tokens per sequence.")
    global_batch_size: Count = Field(16, description="Sequences per optimizer step, whatever the gang's size.")
    batch_size_warmup: tuple[BatchStage, ...] = Field(
        (),
        max_length=16,
        description="Smaller batches at the start, in order; then global_batch_size. Not with a pipeline.",
    )
    tokens: Annotated[int, Field(ge=1, le=10**18)] | None = Field(
        None,
        description="Tokens to train on, such as 300B or 1.5T (K, M, B and T are powers of 1000), instead of steps, "
        "which are then as many as it takes.",
    )
    steps: int = Field(None, ge=1, le=100_000_000, validate_default=True, description="Optimizer steps, or tokens.")
    micro_batch_size: Count = Field(16, description="Sequences per micro-batch on a rank.")
    precision: Literal["fp32", "bf16", "fp8"] = Field(
        "fp32",
        description="Compute type; master weights stay fp32. fp8: like bf16, but blocks' products and their input "
        "gradients use 8 bits with a scale per row; btp only; bf16 on GPUs without fp8, or, if "
        "resources.accelerator_type names these, refused.",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay each step as a CUDA graph. auto: if possible, which it is not on CPU or in pipelines; "
        "on: fail if it is not possible; off: launch every kernel separately. Steps of batch_size_warmup are never "
        "captured.",
    )
    seed: int = Field(0, ge=0, lt=2**31)
    z_loss: Share = Field(
        0.0,
        description="Weight of the z-loss, the square of the logits' log-sum-exp (PaLM: 1e-4). It contributes to the "
        "gradients but not to reported losses.",
    )
    attention: SparseAttentionConfig | None = Field(
        None, description="Sparse attention in training; validation and samples use dense attention. Default: dense."
    )
    evaluate_every_steps: Count = Field(
        100, description="Evaluate on the validation text every this many steps, and at the end."
    )
    evaluate_at_start: bool = Field(False, description="Evaluate before the first step, too.")
    evaluate_sequences: Count = Field(64, description="Validation sequences per evaluation, for each set.")

    sample: SampleConfig | None = Field(None, description="Text to generate during training. Default: none.")

    @field_validator("tokens", "steps", mode="before")
    @classmethod
    def _steps_of_tokens(cls, value: Any, info: Any) -> Any:
        """Read tokens such as 300B or 3e11 as a whole number, and fill in the steps that it takes to train on them."""
        if info.field_name == "tokens":
            if isinstance(value, str):
                if (number := _TOKENS.fullmatch(value)) is None:
                    raise ValueError("must be a number of tokens, such as 300B or 1.5T; units are K, M, B and T")
                return round(Decimal(number[1]) * _UNITS[number[2]])
            return int(value) if isinstance(value, float) and value.is_integer() else value
        tokens, batch, length = map(info.data.get, ("tokens", "global_batch_size", "sequence_length"))
        if value is None and "tokens" in info.data and tokens is None:
            raise PydanticKnownError("missing")
        if None in (tokens, batch, length, info.data.get("batch_size_warmup")):  # one of them is invalid
            return 1 if value is None else value
        left, steps = -(-tokens // length), 0  # in sequences
        for stage in info.data["batch_size_warmup"]:
            of_stage = min(stage.until_step - steps, -(-left // stage.global_batch_size))
            left, steps = left - of_stage * stage.global_batch_size, steps + of_stage
        steps += max(0, -(-left // batch))
        if value not in (None, steps):
            raise ValueError(f"tokens={tokens:,} takes {steps:,} steps, not {value}; leave one of the two out")
        return steps

    @field_validator("sample", "batch_size_warmup")
    @classmethod
    def _fields_go_together(cls, value: Any, info: Any) -> Any:
        """Check that samples are few and fit, and that batches grow."""
        steps, length, last = map(info.data.get, ("steps", "sequence_length", "global_batch_size"))
        if info.field_name == "batch_size_warmup":
            for before, after in pairwise(stage.until_step for stage in value):
                if after <= before:
                    raise ValueError(f"until_step={after} comes after until_step={before}; put stages in order")
            for smaller, larger in pairwise([*(stage.global_batch_size for stage in value), last]):
                if larger is not None and larger <= smaller:
                    raise ValueError(f"a batch of {larger} follows one of {smaller}; let batches grow up to the last")
        elif None not in (value, steps, length):
            if steps > MOST_SAMPLINGS * (every := value.every_steps):
                often = f"every {every} of {steps} steps is more than {MOST_SAMPLINGS} times"
                raise ValueError(f"{often}; make every_steps {-(-steps // MOST_SAMPLINGS)} or more")
            if (new := value.max_new_tokens) >= length:
                room = f"max_new_tokens={new} leaves no room for a prompt in a sequence of {length} tokens"
                raise ValueError(f"{room}; ask for fewer")
        return value

    @property
    def attended_share(self) -> float:
        """Upper bound on the share of a sequence's query-key pairs that attention computes."""
        return 1.0 if self.attention is None else self.attention.budget

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches per step of a data parallel replica, once the batch has its full size."""
        return self.global_batch_size // (self.micro_batch_size * replicas)

    @property
    def common_batch(self) -> int:
        """The greatest common divisor of all steps' batch sizes, in sequences."""
        return gcd(self.global_batch_size, *(stage.global_batch_size for stage in self.batch_size_warmup))

    def batch_size(self, step: int) -> int:
        """Sequences in optimizer step ``step``, counted from 1."""
        stages = (stage.global_batch_size for stage in self.batch_size_warmup if step <= stage.until_step)
        return next(stages, self.global_batch_size)

    def samples(self, steps: int) -> int:
        """Sequences in the first ``steps`` optimizer steps."""
        total = done = 0
        for stage in self.batch_size_warmup:
            until = min(stage.until_step, steps)
            total += (until - done) * stage.global_batch_size
            done = until
        return total + (steps - done) * self.global_batch_size

    @property
    def total_tokens(self) -> int:
        """Tokens in all steps: at least ``tokens``."""
        return self.samples(self.steps) * self.sequence_length


class LoroConfig(Config):
    """How LORO alternates exact and lazy steps."""

    exact_every_steps: Count = Field(500, description="Take an exact step every this many steps; the others are lazy.")
    rewarm_steps: Count = Field(5, description="Steps over which the learning rate warms up again after an exact step.")


class MuonConfig(Config):
    """How Muon updates low-rank factors; AdamW updates the other weights."""

    momentum: float = Field(0.95, ge=0, lt=1, description="Nesterov momentum of the factors' gradients.")


Schedule = Literal["cosine", "linear", "constant", "wsd"]
NO_CLIPPING = 1e9  # a norm that no gradient reaches


class OptimizerConfig(Config):
    """The optimizer and the learning-rate schedule, which begins with a linear warm-up.

    Defaults are the CoLA paper's; for loro, those of its authors' scripts (github.com/mzf666/LORO-main, scripts).
    """

    kind: Literal["adamw", "loro", "muon"] = Field(
        "adamw",
        description="loro: Riemannian steps on the low-rank products; family=svd under btp only. muon: orthogonalized "
        "steps of the low-rank factors, scaled to the size of AdamW's; under btp only.",
    )
    loro: LoroConfig | None = Field(None, validate_default=True, description="For kind=loro only.")
    muon: MuonConfig | None = Field(None, validate_default=True, description="For kind=muon only.")
    learning_rate: float = Field(3e-3, gt=0, lt=10, description="Default: 0.003; 0.01 for loro.")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    epsilon: float | None = Field(None, gt=0, lt=1, description="Default: 1e-8; 1e-6 for loro.")
    weight_decay: float = Field(0.01, ge=0, le=1000, description="Default: 0.01; 0 for loro.")
    clip_norm: float = Field(
        0.5, gt=0, le=1e12, description="Largest global gradient norm. Default: 0.5; for loro 1e9, which clips nothing."
    )
    schedule: Schedule = Field(
        "cosine",
        description="The learning rate after the warm-up: cosine decay, linear decay, constant, or wsd: constant, then "
        "linear decay in the last decay_steps.",
    )
    decay_steps: Count | None = Field(
        None, description="For schedule=wsd only. Default: a tenth of the steps after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate_ratio: Share = Field(
        0.1, description="Final learning rate as a fraction of the peak; not for schedule=constant."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_loro(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kind") == "loro":
            return {"learning_rate": 0.01, "weight_decay": 0.0, "clip_norm": NO_CLIPPING} | values
        return values

    @field_validator("loro", "muon", "decay_steps")
    @classmethod
    def _fields_belong_to_their_kind(cls, value: Any, info: Any) -> Any:
        kind, schedule, name = info.data.get("kind"), info.data.get("schedule"), info.field_name
        if name == "decay_steps":
            if value is not None and schedule != "wsd":
                raise ValueError(f"schedule={schedule} has no separate decay length; leave it out, or set schedule=wsd")
            return value
        if value is not None and kind != name:
            without = {"loro": "takes no exact steps", "muon": "orthogonalizes nothing"}[name]
            raise ValueError(f"kind={kind} {without}; leave {name} out, or set kind={name}")
        return value or ({"loro": LoroConfig, "muon": MuonConfig}[name]() if kind == name else None)

    @property
    def adam_epsilon(self) -> float:
        """The term added to the root of the second moment, with the default filled in."""
        return self.epsilon or (1e-6 if self.kind == "loro" else 1e-8)
