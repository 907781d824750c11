"""Bytes per token that a block and the head keep on one rank for the backward pass.

Widths are per rank: w of the residual, q of the queries, k of the keys, m of the MLP, r of a latent; h heads. Under
btp w = d/p, q = d/p, k = d_kv/p, m = f/p, and r is whole; under vanilla all are whole except the latent, r/p; under
fullrank w is whole and the rest is split (``architecture.Sharding``). Without recomputation a block keeps, in
the compute type,

==================  ===================================  =========================================================
what                elements per token                   kept by
==================  ===================================  =========================================================
residual            2w                                   the products that follow it: its input, and after attention
latents             7r, and 7r again where the epilogue  ``latent_epilogue`` its input, ``deferred.product`` its output
                    makes new ones: after a norm of a
                    sharded residual, or with a SiLU
attention           q + 2k, q, and h in fp32             torch's: its inputs, its output, and log-sum-exps
MLP                 2m, m                                ``gated_product`` its inputs, ``deferred.product`` its output
norms               one for each product after a norm,   ``exchange``: their statistics; for a whole residual
                    or w for a whole residual            ``rms_norm``'s output
QK-norm             q + k, and one per head in fp32      torch's norm: its inputs, and their statistics
LaX                 0, 7r or 21r depending on the gate   ``crossing``: the gate's output and intermediate results
==================  ===================================  =========================================================

With ``recompute: latent`` a block keeps 7r + 2w, the statistics, and the sum of squares it began with; attention's
output (q) and the MLP's product (m) where the next projection reads them other than through latents; context parallel
ranks also keep attention's output (q) in any case, and its log-sum-exps (h in fp32). ``shared`` keeps 7r/p in place of
7r; ``full`` keeps w and that sum. LaX's carried latents add 7r, or under ``shared`` 7r/p and only where they cross.
With ``offload`` the host holds what ``shared`` keeps, on one rank with p = 1, and the device only attention's output on
context parallel ranks. On a CPU the kernels' references run, which keep more.
``tests/numerics/test_memory_plan.py`` measures both storage by storage. In bf16 on a CPU, with a norm other than the
fused one, this overestimates by up to one fp32 residual per block; and by 2r for a recomputed block that receives
latents from an svd block into which none cross.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import TypeVar, cast

from boost_core.architecture import chosen_sharding, gate_matrices, projection_groups, reads_input, saved_latents
from boost_core.config.model import Activation, ModelConfig
from boost_core.config.parallelism import TRAITS, ParallelismConfig, RecomputeMode

PRECISE = 4  # bytes of statistics, sums and masters

# Fields that do not affect how a block is split.
_OF_OTHERS = {
    "pipeline_parallel_size", "data_parallel_size", "pipeline_schedule", "pipeline_layers_per_stage", "zero_stage",
    "optimizer_offload", "recompute",
}  # fmt: skip

_Method = TypeVar("_Method", bound=Callable[..., int])


def _cached(method: _Method) -> _Method:
    """Cache a method's results: a search asks for the same ones for thousands of layouts."""

    @wraps(method)
    def cached(self: "Activations", *arguments: Hashable) -> int:
        key = method.__name__, arguments
        if key not in self.cache:
            self.cache[key] = method(self, *arguments)
        return self.cache[key]

    return cast(_Method, cached)


class Activations:
    """Activations of one model on one rank.

    Args:
        model: The model.
        parallelism: How it is split; legal for the model.
        element_bytes: Bytes per element of the compute type.
        kernels: Whether Triton's kernels run, as on a GPU, or their references.

    Attributes:
        sharding: How the tensor parallel strategy splits the model.
        residual: Width w.
        latent: Width r; 0 without bottlenecks.
        query: Width q.
        key_value: Width k.
        carried: Bytes per token of the latents that LaX hands from block to block.
        blocks_ahead: Blocks of which what the host has is fetched ahead: one more where it is then gathered, too.
        cache: Cached results.
    """

    def __init__(self, model: ModelConfig, parallelism: ParallelismConfig, element_bytes: int, kernels: bool) -> None:
        self.model, self.parallelism, self.element_bytes, self.kernels = model, parallelism, element_bytes, kernels
        self.cache: dict[tuple[str, Hashable], int] = {}
        self.sharding = chosen_sharding(model, parallelism)
        self._size = parallelism.tensor_parallel_size
        self._split = self._size if self.sharding.wide else 1  # parts into which heads and MLP are split
        self.residual = model.hidden_size // (self._size if self.sharding.residual else 1)
        self.latent = (model.rank or 0) // (self._size if self.sharding.latents else 1)
        self.query, self.key_value = model.hidden_size // self._split, model.key_value_size // self._split
        self._mlp, self._heads = model.intermediate_size // self._split, model.num_attention_heads // self._split
        self.blocks_ahead = 2 if self._size > 1 else 1

        groups = projection_groups(model)
        normed = [group for group in groups if group.norm]
        self._projections = sum(len(group.wide_outs) for group in groups)
        self._projections_together = max(len(group.wide_outs) for group in groups)  # with a common input
        self._normed = sum(len(group.wide_outs) for group in normed)  # projections after a norm
        # Whether projections with a common input share a product; dense ones always do.
        self._grouped = parallelism.group_projections or model.rank is None
        self._products = sum(len(group.products(self._grouped)) for group in normed)  # after a norm
        # Pieces of equal width (``model.low_rank``) into which their latents are divided.
        self._normed_pieces = sum(len(group.pieces(self._grouped)) for group in normed)
        # Widths of inputs, other than the residual, on which groups' outputs depend not through latents alone.
        self._inputs_read = {
            group.name: group.wide_in // self._split for group in groups if not group.norm and reads_input(model, group)
        }
        # Norms whose statistic only latents are scaled by.
        self._latent_norms = sum(not reads_input(model, group) for group in normed)
        # Whether latents are scaled by a norm's statistic after their exchange.
        self._scaled = self.sharding.residual and parallelism.norm != "sync"
        self.carried = 0 if model.lax is None else self._projections * self.latent * element_bytes

        # Statistics are sent with the latents in their type, or in separate collectives; on one rank nothing is sent,
        # and norms read the residual's own.
        self._sent_statistics = self._products * (element_bytes if parallelism.norm == "fused" else PRECISE)
        self._first_squares = PRECISE if self.sharding.residual else 0
        self._block_statistics = self._first_squares + self._sent_statistics if self._size > 1 else 2 * PRECISE

        # Queries and keys rotated out of place, where the values next to them keep their inputs alive. Context parallel
        # ranks copy values.
        self._rotated = 0
        if self._grouped and parallelism.context_parallel_size == 1:
            self._rotated = 2 * self.query if self.query == self.key_value else self.key_value
        # Torch's norm of whole rows where it has no kernel: an element's copy in fp32, and both of these, the row in
        # fp32 and the normed row before scaling. The residual itself is freed where such norms keep a copy of it.
        self._fp32_copy = PRECISE if element_bytes < PRECISE else 0
        self._composite_norm = PRECISE + self._fp32_copy
        self._freed = element_bytes if element_bytes < PRECISE else 0

    def embedding(self) -> int:
        """Bytes kept by the embedding: with a split vocabulary, the token's index and whether it is in the shard."""
        return 0 if self.sharding.residual else 8 + self.element_bytes

    def stream_start(self) -> int:
        """Bytes kept of the residual stream's start for its sums of squares, where the first block's is on the host.

        A reference keeps a copy in fp32, which ``head`` counts.
        """
        itself = self.kernels or self.element_bytes == PRECISE or not self.sharding.residual
        return self.residual * self.element_bytes if itself else 0

    @_cached
    def block(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Bytes that a block keeps.

        Args:
            crossed: Whether the previous block's latents cross into it.
            receives: Whether it receives latents; a recomputed block keeps them in any case, unless they are shared.
            mode: What it keeps.
        """
        traits = TRAITS[mode]
        if traits.again == "nothing":
            return self._whole_block(crossed)
        if traits.again == "all":
            return self.residual * self.element_bytes + self._first_squares + receives * self.carried
        # Context parallel ranks keep attention's output and log-sum-exps, so that no keys are sent again.
        attended = 0
        if self.parallelism.context_parallel_size > 1:
            in_segments = "output" in self._inputs_read and not traits.on_host
            attended = self._heads * PRECISE + (0 if in_segments else self.query * self.element_bytes)
        return attended + (0 if traits.on_host else self._segments(crossed, receives, mode))

    def on_host(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Bytes that a block keeps in the host's memory. Arguments as in ``block``."""
        return self._segments(crossed, receives, mode) if TRAITS[mode].on_host else 0

    @_cached
    def segment_fetched(self, crossed: bool, mode: RecomputeMode) -> int:
        """Bytes on the device of the segment that is recomputed, beside the blocks fetched ahead of it.

        Either a block's first, with the latents of queries, keys and values, or its last, while the residual of the
        next block's first has not been released. Arguments as in ``block``.
        """
        if not TRAITS[mode].on_host:
            return 0
        latent = (2 if crossed else 1) * self.latent // self._size
        widest = max(self.residual + self._projections_together * latent, 2 * self.residual + latent)
        return widest * self.element_bytes + self._block_statistics

    @_cached
    def _segments(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Inputs of the segments of a block that is recomputed between its exchanges."""
        saved = 2 * self.residual * self.element_bytes + self._block_statistics
        saved += sum(self._inputs_read.values()) * self.element_bytes
        if TRAITS[mode].slices and (self._size > 1 or TRAITS[mode].on_host):
            return saved + self.shared(crossed) * self.element_bytes
        return saved + self._projections * self.latent * self.element_bytes + receives * self.carried

    def shared(self, crossed: bool) -> int:
        """Elements of this rank's slice of a block's latents, and of those that cross into it."""
        return sum(saved_latents(self.model, self.parallelism, crossed)) // self._size

    @_cached
    def block_backward(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Extra bytes of the backward pass through a block: recomputed activations, and gradients of activations.

        Approximate: the residual's gradient and those around it, and the MLP's three or attention's. Arguments as in
        ``block``.
        """
        widths = 3 * self.residual + max(3 * self._mlp, 2 * (self.query + self.key_value))
        if self.model.lax is not None:
            # Of latents received and handed on; and a reference makes those of three at a time step by step.
            widths += (2 * self._projections + (0 if self.kernels else 12)) * self.latent
        gradients = widths * self.element_bytes if self.kernels else (widths + 2 * self.query) * PRECISE
        traits = TRAITS[mode]
        if traits.again == "nothing":
            return gradients
        gradients += self.blocks_ahead * self.on_host(crossed, receives, mode)
        if traits.slices and self._size > 1:
            # Gathered latents: of a block and one more segment, while the slices still exist.
            gradients += (
                (2 if crossed else 1)
                * (self._projections + self._projections_together)
                * (self.latent * self.element_bytes)
            )
        segments = traits.again == "segments"
        again = self._whole_block(crossed) - self.block(crossed, receives, "latent" if segments else mode)
        if segments and self.kernels:
            # One segment at a time, between two exchanges.
            attention = (3 if self.model.qk_norm else 2) * (self.query + self.key_value) + 3 * self.latent
            mlp = 3 * self._mlp + 2 * self.latent
            again = min(again, self.element_bytes * max(attention, mlp) + PRECISE * self._heads)
        return gradients + again

    def fp8_operand(self) -> int:
        """Most bytes of a product's operand in 8 bits: for gate and up together, their gradients."""
        widest = max(2 * self._mlp, self.query + 2 * self.key_value, self._projections_together * self.latent)
        return widest + PRECISE * self._projections_together

    def head(self) -> int:
        """Bytes kept by the final norm and the loss, including the last residual."""
        hidden, element = self.model.hidden_size, self.element_bytes
        loss = 8 + 2 * PRECISE  # the target's index, the log-sum-exp, and the norm's statistic
        norm = (self.residual + hidden) * element
        if self.sharding.residual:
            norm += 0 if self.kernels else self.residual * self._fp32_copy
            # The gathered vectors in fp32, once scaled; on one rank a view with the statistic next to it.
            return norm + loss + hidden * PRECISE + (element if self._size == 1 and element == PRECISE else 0)
        return norm + loss + (0 if self.kernels else hidden * (self._composite_norm - self._freed))

    def head_norm_backward(self) -> int:
        """Bytes held during the backward pass through the final norm, including all that ``head`` keeps."""
        hidden = self.model.hidden_size
        if self.sharding.residual:
            # Gradients in fp32: of the scaled rows, of the rows, and the summands of their scales' gradients.
            return self.head() + 3 * hidden * PRECISE
        # Torch's kernel has its input and output; composed of torch's operations, each summand is separate.
        return self.head() + (2 * hidden * self.element_bytes if self.kernels else 5 * hidden * PRECISE)

    def _whole_block(self, crossed: bool) -> int:
        element, width = self.element_bytes, self.residual
        widths = 2 * width + 2 * self.query + 2 * self.key_value + 3 * self._mlp
        saved = widths * element + self._heads * PRECISE

        # Statistics, and what a norm that is a separate pass keeps.
        if not self.sharding.residual:
            saved += self._products * (width * element + PRECISE)
        else:
            statistics = self._sent_statistics if self._size > 1 else 2 * PRECISE
            if self.parallelism.norm != "sync":
                saved += statistics
            if self.parallelism.norm != "fused":
                saved += self._products * (2 * width * element + PRECISE + width * self._fp32_copy)
            if self.parallelism.norm == "online_paper":
                saved += self._normed * self.latent * PRECISE

        # Latents, or those that cross: the gate's output and intermediate results.
        if crossed:
            gate = (0, 1, 3)[len(gate_matrices(self.model))]
            saved += (2 + gate) * self._projections * self.latent * element
        else:
            latents = self._normed * (
                2 if self._scaled or self.model.bottleneck_activation is not Activation.LINEAR else 1
            )
            latents += (self._projections - self._normed) * (
                2 if self.model.bottleneck_activation is not Activation.LINEAR else 1
            )
            saved += latents * self.latent * element

        if self.model.qk_norm:
            width = self.query + self.key_value
            statistics = PRECISE * width // self.model.head_size
            if self.kernels:
                saved += width * element + statistics
            else:
                # Composed of torch's operations: an input in fp32, which is the projections' output unless that is
                # narrower; the references already count what the values next to them keep of it.
                own = (width - self._rotated) * element if element == PRECISE else 0
                saved += width * self._composite_norm + statistics + own
        return saved if self.kernels else saved + self._of_references(crossed)

    def _of_references(self, crossed: bool) -> int:
        """What the kernels' references keep beyond the kernels: each of torch's operations keeps its own inputs."""
        element, copies, activation = (
            self.element_bytes,
            self.element_bytes < PRECISE,
            self.model.bottleneck_activation is not Activation.LINEAR,
        )
        more = self._mlp * element if self.model.mlp_activation is not Activation.LINEAR else 0
        if self.sharding.residual:
            more += 2 * self.residual * self._fp32_copy
            if self._scaled:  # reciprocal roots, in place of the residual's sums on one rank that nothing else reads
                more += PRECISE * (self._normed_pieces - (self._latent_norms if self._size == 1 else 0))
        else:
            more += self.residual * (self._products * self._composite_norm - 2 * self._freed)
        more += self._rotated * element
        if crossed:
            steps = PRECISE * self._projections * (3 if activation else 2)
            arrived = PRECISE * self._normed if self._scaled else 0
            sent = element * self._normed if copies and self._scaled and self._size > 1 else 0
            gate = -self._projections * element if gate_matrices(self.model) else 0
            # The kernel's latents as they arrived are already counted.
            latents = (steps + arrived + sent + gate - element * self._projections) * self.latent
            ones = self._projections - self._normed + (0 if self._scaled else self._normed_pieces)
            return more + latents + PRECISE * 2 * self._projections + element * ones
        latents = 0
        if self._scaled:
            latents += PRECISE * self._normed if copies else 0
            latents += PRECISE * self._normed if activation else 0
            latents -= element * self._normed if copies and self._size == 1 else 0
        elif activation and copies:
            latents += (PRECISE - element) * self._normed
        if activation and copies:
            latents += (PRECISE - element) * (self._projections - self._normed)
        return more + latents * self.latent


@dataclass(frozen=True)
class BlockSplit:
    """How a block is split, regardless of stages and replicas; two that split it alike are equal."""

    parts: tuple[Hashable, ...]
    parallelism: ParallelismConfig = field(compare=False)

    @classmethod
    def of(cls, parallelism: ParallelismConfig) -> "BlockSplit":
        """Return the split of a job's parallelism."""
        parts = tuple(value for name, value in vars(parallelism).items() if name not in _OF_OTHERS)
        return cls(parts, parallelism)


@lru_cache(1024)
def activations(model: ModelConfig, split: BlockSplit, element_bytes: int, kernels: bool) -> Activations:
    """Return ``Activations``, shared by layouts that split a block alike."""
    return Activations(model, split.parallelism, element_bytes, kernels)
