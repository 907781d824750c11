"""What a block and the head keep of each token for the backward pass, in bytes on one rank.

Widths are this rank's: w of the residual, q of the queries, k of the keys, m of the MLP, r of a latent; h heads. Under
btp w = d/p, q = d/p, k = d_kv/p, m = f/p, and r is whole; under vanilla all are whole but the latent, r/p; under
fullrank w is whole and the rest is split (``architecture.sharding``). Without recomputation a block keeps, in
the compute type,

==================  ===================================  =========================================================
what                elements a token                     who keeps it
==================  ===================================  =========================================================
residual            2w                                   the products after it: its input, and after attention
latents             7r, and 7r again where the epilogue  ``latent_epilogue`` its input, ``deferred.product`` its output
                    makes new ones: behind a norm of a
                    sharded residual, or with a SiLU
attention           q + 2k, q, and h in fp32             torch's: its inputs, its output, and log-sum-exps
MLP                 2m, m                                ``gated_product`` its inputs, ``deferred.product`` its output
norms               one for each product behind one, or  ``exchange``: their statistics; of a whole residual
                    w of a whole residual                ``rms_norm``'s output
QK-norm             q + k, and one a head in fp32        torch's norm: its inputs, and their statistics
LaX                 0, 7r or 21r by the gate             ``crossing``: what the gate let through and made meanwhile
==================  ===================================  =========================================================

With ``recompute: latent`` a block keeps 7r + 2w, the statistics, and the sum of squares it began with, and of context
parallel ranks q and h in fp32, attention's output and log-sum-exps; with ``shared`` 7r/p in place of 7r; with ``full``
w and that sum; LaX's carried latents, 7r, beside them, under ``shared`` 7r/p and only where they cross. On a CPU the
kernels' references run, which keep more.
``tests/numerics/test_memory_plan.py`` measures both storage by storage. In bf16 on a CPU, with a norm other than the
fused one, this is up to one fp32 residual a block too much; and 2r for a block that is computed again and that is given
latents by one of an svd into which none cross.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, wraps
from typing import TypeVar, cast

from boost_core.architecture.families import gate_matrices
from boost_core.architecture.projections import projection_groups
from boost_core.architecture.sharding import Sharding, chosen_sharding, kept_latents
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig, RecomputeMode

PRECISE = 4  # bytes of statistics, sums and masters

# Not of how a block is split.
_OF_OTHERS = {
    "pipeline_parallel_size", "data_parallel_size", "pipeline_schedule", "pipeline_layers_per_stage", "zero_stage",
    "optimizer_offload", "recompute",
}  # fmt: skip

_Method = TypeVar("_Method", bound=Callable[..., int])


def _worked_out_once(method: _Method) -> _Method:
    """Have a method remember its answers: a search asks for the same of thousands of layouts."""

    @wraps(method)
    def answer(self: "Activations", *arguments: Hashable) -> int:
        question = method.__name__, arguments
        if question not in self.answers:
            self.answers[question] = method(self, *arguments)
        return self.answers[question]

    return cast(_Method, answer)


@dataclass(frozen=True)
class Activations:
    """Those of one model on one rank.

    Attributes:
        model: The model.
        parallelism: How it is split; legal with the model.
        element_bytes: Of the compute type.
        kernels: Whether Triton's kernels run, as on a GPU, or their references.
        answers: What was worked out already.
    """

    model: ModelConfig
    parallelism: ParallelismConfig
    element_bytes: int
    kernels: bool
    answers: dict[tuple[str, Hashable], int] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def sharding(self) -> Sharding:
        """How the tensor parallel strategy splits it."""
        return chosen_sharding(self.model, self.parallelism)

    @property
    def residual(self) -> int:
        """Width w."""
        return self.model.hidden_size // (self._size if self.sharding.residual else 1)

    @property
    def latent(self) -> int:
        """Width r; 0 without bottlenecks."""
        return (self.model.rank or 0) // (self._size if self.sharding.latents else 1)

    @property
    def query(self) -> int:
        """Width q."""
        return self.model.hidden_size // self._split

    @property
    def carried(self) -> int:
        """Bytes of the latents that LaX hands from block to block."""
        return 0 if self.model.lax is None else self._projections * self.latent * self.element_bytes

    def embedding(self) -> int:
        """What the embedding keeps of each token: of a split vocabulary the token's place in it, and whether it is."""
        return 0 if self.sharding.residual else 8 + self.element_bytes

    @_worked_out_once
    def block(self, crossed: bool, given: bool, mode: RecomputeMode) -> int:
        """What a block keeps of each token.

        Args:
            crossed: Whether latents of the block before cross into it.
            given: Whether it is given them, which a block that is computed again keeps in any case, unless they are
                shared.
            mode: What it keeps.
        """
        if mode == "none":
            return self._whole_block(crossed)
        first_squares = PRECISE if self.sharding.residual else 0
        if mode == "full":
            return self.residual * self.element_bytes + first_squares + given * self.carried
        latents = 2 * self.residual * self.element_bytes + self._kept_latents(crossed, given, mode)
        # Context parallel ranks keep attention's output and log-sum-exps, so that no key comes again.
        if self.parallelism.context_parallel_size > 1:
            latents += self.query * self.element_bytes + self._heads * PRECISE
        # On one rank nothing is sent: each norm reads the residual's own sums of squares.
        return latents + (first_squares + self._sent_statistics() if self._size > 1 else 2 * PRECISE)

    def _kept_latents(self, crossed: bool, given: bool, mode: RecomputeMode) -> int:
        """Bytes a token of a block that is computed again between its exchanges."""
        if mode == "shared" and self._size > 1:
            return self.shared(crossed) * self.element_bytes
        return self._projections * self.latent * self.element_bytes + given * self.carried

    def shared(self, crossed: bool) -> int:
        """Elements a token of this rank's slice of a block's latents, and of those that cross into it."""
        return sum(kept_latents(self.model, self.parallelism, crossed)) // self._size

    @_worked_out_once
    def block_backward(self, crossed: bool, given: bool, mode: RecomputeMode) -> int:
        """What the backward pass through a block takes on top: what is computed again, and gradients of activations.

        About: the residual's gradient and those around it, and the MLP's three or attention's. Arguments as ``block``.
        """
        widths = 3 * self.residual + max(3 * self._mlp, 2 * (self.query + self.key_value))
        if self.model.lax is not None:
            # Of latents handed in and on; and a reference makes those of three at a time step by step.
            widths += (2 * self._projections + (0 if self.kernels else 12)) * self.latent
        gradients = widths * self.element_bytes if self.kernels else (widths + 2 * self.query) * PRECISE
        if mode == "none":
            return gradients
        if mode == "shared" and self._size > 1:
            # As far as they are gathered: of a block, and of one segment more, while slices are there still.
            gradients += (
                (2 if crossed else 1)
                * (self._projections + self._projections_together)
                * (self.latent * self.element_bytes)
            )
            mode = "latent"
        again = self._whole_block(crossed) - self.block(crossed, given, mode)
        if mode == "latent" and self.kernels:
            # Between two exchanges at a time.
            attention = (3 if self.model.qk_norm else 2) * (self.query + self.key_value) + 3 * self.latent
            mlp = 3 * self._mlp + 2 * self.latent
            again = min(again, self.element_bytes * max(attention, mlp) + PRECISE * self._heads)
        return gradients + again

    @_worked_out_once
    def fp8_operand(self) -> int:
        """Bytes a token of a product's factor in 8 bits, at most: that of gate and up, of their gradients."""
        widest = max(2 * self._mlp, self.query + 2 * self.key_value, self._projections_together * self.latent)
        return widest + PRECISE * self._projections_together

    @_worked_out_once
    def head(self) -> int:
        """What the final norm and the loss keep of each token, the last residual included."""
        hidden, element = self.model.hidden_size, self.element_bytes
        loss = 8 + 2 * PRECISE  # the target's place, the log-sum-exp, and the norm's statistic
        norm = (self.residual + hidden) * element
        if self.sharding.residual:
            norm += 0 if self.kernels else self._fp32_copy(self.residual)
            # The gathered vectors in fp32, as they are scaled; on one rank a view that has the statistic beside it.
            return norm + loss + hidden * PRECISE + (element if self._size == 1 and element == PRECISE else 0)
        return norm + loss + (0 if self.kernels else self._composite_norm(hidden) - self._let_go(hidden))

    @_worked_out_once
    def head_norm_backward(self) -> int:
        """What the backward pass through the final norm takes of each token, all that ``head`` keeps included."""
        hidden = self.model.hidden_size
        if self.sharding.residual:
            # In fp32: of the scaled rows, of the rows, and the summands of their scales'.
            return self.head() + 3 * hidden * PRECISE
        # Torch's kernel has its input and output; in torch's operations each summand is there for itself.
        return self.head() + (2 * hidden * self.element_bytes if self.kernels else 5 * hidden * PRECISE)

    def _whole_block(self, crossed: bool) -> int:
        widths = 2 * self.residual + 2 * self.query + 2 * self.key_value + 3 * self._mlp
        kept = widths * self.element_bytes + self._heads * PRECISE + self._norms()
        kept += self._crossings() if crossed else self._latents()
        kept += self._head_norms()
        return kept if self.kernels else kept + self._of_references(crossed)

    def _norms(self) -> int:
        """Statistics, and what a norm that is a pass of its own keeps."""
        width, products = self.residual, self._products
        if not self.sharding.residual:
            return products * (width * self.element_bytes + PRECISE)
        if self.parallelism.norm == "fused":
            return self._sent_statistics() if self._size > 1 else 2 * PRECISE
        normed = products * (2 * width * self.element_bytes + PRECISE + self._fp32_copy(width))
        if self.parallelism.norm == "sync":
            return normed
        sent = self._sent_statistics() if self._size > 1 else 2 * PRECISE
        return normed + sent + self._normed * self.latent * PRECISE

    def _head_norms(self) -> int:
        """What norms of queries and keys keep."""
        if not self.model.qk_norm:
            return 0
        width = self.query + self.key_value
        statistics = PRECISE * width // self.model.head_size
        if self.kernels:
            return width * self.element_bytes + statistics
        # In torch's operations an input in fp32, which is the projections' own unless that is narrower; the references
        # count already what the values beside them keep of it.
        own = (width - self._turned()) * self.element_bytes if self.element_bytes == PRECISE else 0
        return self._composite_norm(width) + statistics + own

    def _sent_statistics(self) -> int:
        """Beside the latents in their type, or in collectives of their own."""
        return self._products * (self.element_bytes if self.parallelism.norm == "fused" else PRECISE)

    def _latents(self) -> int:
        latents = self._normed * (2 if self._scaled or self.model.latent_activation else 1)
        latents += (self._projections - self._normed) * (2 if self.model.latent_activation else 1)
        return latents * self.latent * self.element_bytes

    def _crossings(self) -> int:
        gate = (0, 1, 3)[len(gate_matrices(self.model))]
        return (2 + gate) * self._projections * self.latent * self.element_bytes

    def _of_references(self, crossed: bool) -> int:
        """What the kernels' references keep more than the kernels: each of torch's operations for itself."""
        more = self._mlp * self.element_bytes if self.model.gated_by_silu else 0
        if self.sharding.residual:
            more += 2 * self._fp32_copy(self.residual)
            if self._scaled:  # reciprocal roots, in place of the residual's sums on one rank
                more += PRECISE * (self._normed_pieces - (2 if self._size == 1 else 0))
        else:
            more += self._products * self._composite_norm(self.residual) - 2 * self._let_go(self.residual)
        more += self._turned() * self.element_bytes
        return more + (self._crossed_by_reference() if crossed else self._latents_by_reference())

    def _latents_by_reference(self) -> int:
        copies, activation = self.element_bytes < PRECISE, self.model.latent_activation
        more = 0
        if self._scaled:
            more += PRECISE * self._normed if copies else 0
            more += PRECISE * self._normed if activation else 0
            more -= self.element_bytes * self._normed if copies and self._size == 1 else 0
        elif activation and copies:
            more += (PRECISE - self.element_bytes) * self._normed
        if activation and copies:
            more += (PRECISE - self.element_bytes) * (self._projections - self._normed)
        return more * self.latent

    def _crossed_by_reference(self) -> int:
        copies = self.element_bytes < PRECISE
        steps = PRECISE * self._projections * (3 if self.model.latent_activation else 2)
        arrived = PRECISE * self._normed if self._scaled else 0
        sent = self.element_bytes * self._normed if copies and self._scaled and self._size > 1 else 0
        gate = -self._projections * self.element_bytes if gate_matrices(self.model) else 0
        # The kernel's latents as they arrived are counted already.
        latents = (steps + arrived + sent + gate - self.element_bytes * self._projections) * self.latent
        ones = self._projections - self._normed + (0 if self._scaled else self._normed_pieces)
        return latents + PRECISE * 2 * self._projections + self.element_bytes * ones

    def _turned(self) -> int:
        """Queries and keys turned out of place, where what they were made from is kept by the values beside them.

        Context parallel ranks copy values.
        """
        alike = self.query == self.key_value
        if not self._grouped or self.parallelism.context_parallel_size > 1:
            return 0
        return 2 * self.query if alike else self.key_value

    def _fp32_copy(self, width: int) -> int:
        return width * PRECISE if self.element_bytes < PRECISE else 0

    def _composite_norm(self, width: int) -> int:
        """Torch's norm of whole rows where it has no kernel: rows in fp32, and normed ones before their scale."""
        return width * PRECISE + self._fp32_copy(width)

    def _let_go(self, width: int) -> int:
        """The residual itself, where such norms keep a copy of it in fp32."""
        return width * self.element_bytes if self.element_bytes < PRECISE else 0

    @cached_property
    def _projections(self) -> int:
        """All of a block."""
        return sum(len(group.wide_outs) for group in projection_groups(self.model))

    @cached_property
    def _projections_together(self) -> int:
        """Of one input."""
        return max(len(group.wide_outs) for group in projection_groups(self.model))

    @cached_property
    def _normed(self) -> int:
        """Those that a norm precedes."""
        return sum(len(group.wide_outs) for group in projection_groups(self.model) if group.norm)

    @property
    def _grouped(self) -> bool:
        """Whether projections of one input share a product; dense ones do in any case."""
        return self.parallelism.group_projections or self.model.rank is None

    @property
    def _scaled(self) -> bool:
        """Whether latents are scaled by a norm's statistic after their exchange."""
        return self.sharding.residual and self.parallelism.norm != "sync"

    @property
    def _products(self) -> int:
        """Matrix products that a norm precedes."""
        return sum(len(group.products(self._grouped)) for group in projection_groups(self.model) if group.norm)

    @property
    def _normed_pieces(self) -> int:
        """In how many pieces of one width (``nn.bottleneck``) their latents go on."""
        return sum(len(group.pieces(self._grouped)) for group in projection_groups(self.model) if group.norm)

    @property
    def _size(self) -> int:
        return self.parallelism.tensor_parallel_size

    @property
    def _split(self) -> int:
        """In how many parts heads and MLP are."""
        return self._size if self.sharding.wide else 1

    @property
    def key_value(self) -> int:
        """Width k."""
        return self.model.key_value_size // self._split

    @property
    def _mlp(self) -> int:
        return self.model.intermediate_size // self._split

    @property
    def _heads(self) -> int:
        return self.model.num_attention_heads // self._split


@dataclass(frozen=True)
class BlockSplit:
    """How a block is split, whatever stages and replicas there are; two that split it alike are equal."""

    parts: tuple[Hashable, ...]
    parallelism: ParallelismConfig = field(compare=False)

    @classmethod
    def of(cls, parallelism: ParallelismConfig) -> "BlockSplit":
        """That of a job's."""
        parts = tuple(value for name, value in vars(parallelism).items() if name not in _OF_OTHERS)
        return cls(parts, parallelism)


@lru_cache(1024)
def activations(model: ModelConfig, split: BlockSplit, element_bytes: int, kernels: bool) -> Activations:
    """``Activations``, which layouts share that split a block alike."""
    return Activations(model, split.parallelism, element_bytes, kernels)
