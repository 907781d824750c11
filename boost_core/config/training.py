"""The training trajectory: steps, batches, optimizer and learning rate."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from boost_core.config.base import Config, Count
from boost_core.config.model import SparseAttentionConfig


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


class TrainingConfig(Config):
    """How long to train, on what batches, and in what precision."""

    steps: int = Field(ge=1, le=100_000_000, description="Optimizer steps.")
    sequence_length: int = Field(256, ge=2, le=1_048_576, description="Tokens per sequence.")
    global_batch_size: Count = Field(16, description="Sequences per optimizer step, whatever the gang's size.")
    batch_size_warmup: tuple[BatchStage, ...] = Field(
        (),
        max_length=16,
        description="Smaller batches at the start, in order; then global_batch_size. Not with a pipeline.",
    )
    micro_batch_size: Count = Field(16, description="Sequences per micro-batch on a rank.")
    precision: Literal["fp32", "bf16", "fp8"] = Field(
        "fp32",
        description="Compute type; master weights stay fp32. fp8: like bf16, but blocks' products and their input "
        "gradients use 8 bits with a scale per row; bf16 on GPUs without fp8; btp only.",
    )
    cuda_graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Replay each step as a CUDA graph. auto: if possible, which it is not on CPU or in pipelines; "
        "on: fail if it is not possible; off: launch every kernel separately. Steps of batch_size_warmup are never "
        "captured.",
    )
    seed: int = Field(0, ge=0, lt=2**31)
    z_loss: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Weight of the z-loss, the square of the logits' log-sum-exp (PaLM: 1e-4). It contributes to the "
        "gradients but not to reported losses.",
    )
    attention: SparseAttentionConfig | None = Field(
        None,
        description="Sparse attention in training; validation and samples use dense attention. Default: dense.",
    )
    evaluate_every_steps: Count = Field(
        100, description="Evaluate on the validation text every this many steps, and at the end."
    )
    evaluate_sequences: Count = Field(64, description="Validation sequences per evaluation, for each set.")

    sample: SampleConfig | None = Field(None, description="Text to generate during training. Default: none.")

    @field_validator("sample", "batch_size_warmup")
    @classmethod
    def _fields_go_together(cls, value: Any, info: Any) -> Any:
        """Check that samples are few and fit, and that batches grow."""
        if info.field_name == "sample":
            steps, length = info.data.get("steps"), info.data.get("sequence_length")
            if value is None or steps is None or length is None:
                return value
            if steps > MOST_SAMPLINGS * value.every_steps:
                raise ValueError(
                    f"every {value.every_steps} of {steps} steps is more than {MOST_SAMPLINGS} times; make every_steps "
                    f"{-(-steps // MOST_SAMPLINGS)} or more"
                )
            if value.max_new_tokens >= length:
                raise ValueError(
                    f"max_new_tokens={value.max_new_tokens} leaves no room for a prompt in a sequence of {length} "
                    "tokens; ask for fewer"
                )
            return value
        for before, after in pairwise(value):
            if after.until_step <= before.until_step:
                raise ValueError(
                    f"until_step={after.until_step} comes after until_step={before.until_step}; put stages in order"
                )
        sizes = [*(stage.global_batch_size for stage in value), info.data.get("global_batch_size")]
        for smaller, larger in pairwise(sizes):
            if larger is not None and larger <= smaller:
                raise ValueError(f"a batch of {larger} follows one of {smaller}; let batches grow up to the last")
        return value

    @property
    def attended_share(self) -> float:
        """Upper bound on the share of a sequence's query-key pairs that attention computes."""
        return 1.0 if self.attention is None else self.attention.budget

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches per step of a data parallel replica, once the batch has its full size."""
        return self.global_batch_size // (self.micro_batch_size * replicas)

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


class LoroConfig(Config):
    """How LORO alternates exact and lazy steps."""

    exact_every_steps: Count = Field(500, description="Take an exact step every this many steps; the others are lazy.")
    rewarm_steps: Count = Field(5, description="Steps over which the learning rate warms up again after an exact step.")


class MuonConfig(Config):
    """How Muon updates low-rank factors; AdamW updates the other weights."""

    momentum: float = Field(0.95, ge=0, lt=1, description="Nesterov momentum of the factors' gradients.")


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
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="The learning rate after the warm-up: cosine decay, linear decay, constant, or wsd: constant, then "
        "linear decay in the last decay_steps.",
    )
    decay_steps: Count | None = Field(
        None, description="For schedule=wsd only. Default: a tenth of the steps after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate_ratio: float = Field(
        0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak; not for schedule=constant."
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
        kind, schedule = info.data.get("kind"), info.data.get("schedule")
        match info.field_name:
            case "loro":
                if value is not None and kind != "loro":
                    raise ValueError(f"kind={kind} takes no exact steps; leave loro out, or set kind=loro")
                return value or (LoroConfig() if kind == "loro" else None)
            case "muon":
                if value is not None and kind != "muon":
                    raise ValueError(f"kind={kind} orthogonalizes nothing; leave muon out, or set kind=muon")
                return value or (MuonConfig() if kind == "muon" else None)
            case _ if value is not None and schedule != "wsd":
                raise ValueError(f"schedule={schedule} has no separate decay length; leave it out, or set schedule=wsd")
        return value

    @property
    def adam_epsilon(self) -> float:
        """The term added to the root of the second moment, with the default filled in."""
        return self.epsilon or (1e-6 if self.kind == "loro" else 1e-8)
