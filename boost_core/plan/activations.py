"""What a block and the head keep of each token for the backward pass, in bytes on one rank.

Widths are this rank's: w of the residual, q of the queries, k of the keys, m of the MLP, r of a latent; h heads. Under
btp w = d/p, q = d/p, k = d_kv/p, m = f/p, and r is whole; under vanilla all are whole but the latent, r/p; under
fullrank w is whole and the rest is split (``SHARDED_AXIS`` in ``parallel``). Without recomputation a block keeps, in
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
LaX                 0, 7r or 21r by the gate             ``crossing``: what the gate let through and made meanwhile
==================  ===================================  =========================================================

With ``recompute: latent`` a block keeps 7r + 2w, the statistics, and the sum of squares it began with; with ``full`` w
and that sum; LaX's carried latents, 7r, beside either. On a CPU the kernels' references run, which keep more.
``tests/numerics/test_memory_plan.py`` measures both storage by storage. In bf16 on a CPU, with a norm other than the
fused one, this is up to one fp32 residual a block too much; and 2r for a block that is computed again and that is given
latents by one of an svd into which none cross.
"""

from dataclasses import dataclass
from functools import cached_property

from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.strategy import StrategyName, chosen_strategy

PRECISE = 4  # bytes of statistics, sums and masters
_LATENTS, _NORMED = 7, 5  # all, and those of query, key, value, gate and up


@dataclass(frozen=True)
class Activations:
    """Those of one model on one rank.

    Attributes:
        model: The model.
        parallelism: How it is split; legal with the model.
        element_bytes: Of the compute type.
        kernels: Whether Triton's kernels run, as on a GPU, or their references.
    """

    model: ModelConfig
    parallelism: ParallelismConfig
    element_bytes: int
    kernels: bool

    @cached_property
    def strategy(self) -> StrategyName:
        """The tensor parallel strategy."""
        return chosen_strategy(self.model, self.parallelism)

    @property
    def residual(self) -> int:
        """Width w."""
        return self.model.hidden_size // (self._size if self.strategy == "btp" else 1)

    @property
    def latent(self) -> int:
        """Width r; 0 without bottlenecks."""
        return (self.model.rank or 0) // (self._size if self.strategy == "vanilla" else 1)

    @property
    def carried(self) -> int:
        """Bytes of the latents that LaX hands from block to block."""
        return 0 if self.model.lax is None else _LATENTS * self.latent * self.element_bytes

    def embedding(self) -> int:
        """What the embedding keeps of each token: of a split vocabulary the token's place in it, and whether it is."""
        return 0 if self.strategy == "btp" else 8 + self.element_bytes

    def block(self, crossed: bool, given: bool) -> int:
        """What a block keeps of each token.

        Args:
            crossed: Whether latents of the block before cross into it.
            given: Whether it is given them, which a block that is computed again keeps in any case.
        """
        if self.parallelism.recompute == "none":
            return self._whole_block(crossed)
        first_squares = PRECISE if self.strategy == "btp" else 0
        if self.parallelism.recompute == "full":
            return self.residual * self.element_bytes + first_squares + given * self.carried
        latents = (2 * self.residual + _LATENTS * self.latent) * self.element_bytes + given * self.carried
        # On one rank nothing is sent: each norm reads the residual's own sums of squares.
        return latents + (first_squares + self._sent_statistics() if self._size > 1 else 2 * PRECISE)

    def block_backward(self, crossed: bool, given: bool) -> int:
        """What the backward pass through a block takes on top: what is computed again, and gradients of activations.

        About: the residual's gradient and those around it, and the MLP's three or attention's. Arguments as ``block``.
        """
        widths = 3 * self.residual + max(3 * self._mlp, 2 * (self._query + self._key_value))
        if self.model.lax is not None:
            # Of latents handed in and on; and a reference makes those of three at a time step by step.
            widths += (2 * _LATENTS + (0 if self.kernels else 12)) * self.latent
        gradients = widths * self.element_bytes if self.kernels else (widths + 2 * self._query) * PRECISE
        if self.parallelism.recompute == "none":
            return gradients
        again = self._whole_block(crossed) - self.block(crossed, given)
        if self.parallelism.recompute == "latent" and self.kernels:
            # Between two exchanges at a time.
            attention = 2 * self._query + 2 * self._key_value + 3 * self.latent
            mlp = 3 * self._mlp + 2 * self.latent
            again = min(again, self.element_bytes * max(attention, mlp) + PRECISE * self._heads)
        return gradients + again

    def head(self) -> int:
        """What the final norm and the loss keep of each token, the last residual included."""
        hidden, element = self.model.hidden_size, self.element_bytes
        loss = 8 + 2 * PRECISE  # the target's place, the log-sum-exp, and the norm's statistic
        norm = (self.residual + hidden) * element
        if self.strategy == "btp":
            norm += 0 if self.kernels else self._fp32_copy(self.residual)
            # The gathered vectors in fp32, as they are scaled; on one rank a view that has the statistic beside it.
            return norm + loss + hidden * PRECISE + (element if self._size == 1 and element == PRECISE else 0)
        return norm + loss + (0 if self.kernels else self._composite_norm(hidden) - self._let_go(hidden))

    def head_norm_backward(self) -> int:
        """What the backward pass through the final norm takes of each token, all that ``head`` keeps included."""
        hidden = self.model.hidden_size
        if self.strategy == "btp":
            # In fp32: of the scaled rows, of the rows, and the summands of their scales'.
            return self.head() + 3 * hidden * PRECISE
        # Torch's kernel has its input and output; in torch's operations each summand is there for itself.
        return self.head() + (2 * hidden * self.element_bytes if self.kernels else 5 * hidden * PRECISE)

    def _whole_block(self, crossed: bool) -> int:
        widths = 2 * self.residual + 2 * self._query + 2 * self._key_value + 3 * self._mlp
        kept = widths * self.element_bytes + self._heads * PRECISE + self._norms()
        if self.strategy != "fullrank":
            kept += self._crossings() if crossed else self._latents()
        return kept if self.kernels else kept + self._of_references(crossed)

    def _norms(self) -> int:
        """Statistics, and what a norm that is a pass of its own keeps."""
        width, products = self.residual, self._products
        if self.strategy != "btp":
            return products * (width * self.element_bytes + PRECISE)
        if self.parallelism.norm == "fused":
            return self._sent_statistics() if self._size > 1 else 2 * PRECISE
        normed = products * (2 * width * self.element_bytes + PRECISE + self._fp32_copy(width))
        if self.parallelism.norm == "sync":
            return normed
        sent = self._sent_statistics() if self._size > 1 else 2 * PRECISE
        return normed + sent + _NORMED * self.latent * PRECISE

    def _sent_statistics(self) -> int:
        """Beside the latents in their type, or in collectives of their own."""
        return self._products * (self.element_bytes if self.parallelism.norm == "fused" else PRECISE)

    def _latents(self) -> int:
        latents = _NORMED * (2 if self._scaled or self.model.latent_activation else 1)
        latents += (_LATENTS - _NORMED) * (2 if self.model.latent_activation else 1)
        return latents * self.latent * self.element_bytes

    def _crossings(self) -> int:
        gate = {"identity": 0, "dense": _LATENTS, "tensor": 3 * _LATENTS}[self.model.lax.gate if self.model.lax else ""]
        return (2 * _LATENTS + gate) * self.latent * self.element_bytes

    def _of_references(self, crossed: bool) -> int:
        """What the kernels' references keep more than the kernels: each of torch's operations for itself."""
        more = self._mlp * self.element_bytes if self.model.gated_by_silu else 0
        if self.strategy == "btp":
            more += 2 * self._fp32_copy(self.residual)
            if self._scaled:  # reciprocal roots, in place of the residual's sums on one rank
                more += PRECISE * (self._normed_pieces - (2 if self._size == 1 else 0))
        else:
            more += self._products * self._composite_norm(self.residual) - 2 * self._let_go(self.residual)
        more += self._turned() * self.element_bytes
        if self.strategy == "fullrank":
            return more
        return more + (self._crossed_by_reference() if crossed else self._latents_by_reference())

    def _latents_by_reference(self) -> int:
        copies, activation = self.element_bytes < PRECISE, self.model.latent_activation
        more = 0
        if self._scaled:
            more += PRECISE * _NORMED if copies else 0
            more += PRECISE * _NORMED if activation else 0
            more -= self.element_bytes * _NORMED if copies and self._size == 1 else 0
        elif activation and copies:
            more += (PRECISE - self.element_bytes) * _NORMED
        if activation and copies:
            more += (PRECISE - self.element_bytes) * (_LATENTS - _NORMED)
        return more * self.latent

    def _crossed_by_reference(self) -> int:
        lax = self.model.lax
        if lax is None:
            raise AssertionError("nothing crosses")
        copies = self.element_bytes < PRECISE
        steps = PRECISE * _LATENTS * (3 if self.model.latent_activation else 2)
        arrived = PRECISE * _NORMED if self._scaled else 0
        sent = self.element_bytes * _NORMED if copies and self._scaled and self._size > 1 else 0
        gate = {"identity": 0, "dense": -_LATENTS, "tensor": -_LATENTS}[lax.gate] * self.element_bytes
        # The kernel's latents as they arrived are counted already.
        latents = (steps + arrived + sent + gate - self.element_bytes * _LATENTS) * self.latent
        ones = (_LATENTS - _NORMED) + (0 if self._scaled else self._normed_pieces)
        return latents + PRECISE * 2 * _LATENTS + self.element_bytes * ones

    def _turned(self) -> int:
        """Queries and keys turned out of place, where what they were made from is kept by the values beside them."""
        alike = self._query == self._key_value
        if self.strategy != "fullrank" and not self.parallelism.group_projections:
            return 0
        return 2 * self._query if alike else self._key_value

    def _fp32_copy(self, width: int) -> int:
        return width * PRECISE if self.element_bytes < PRECISE else 0

    def _composite_norm(self, width: int) -> int:
        """Torch's norm of whole rows where it has no kernel: rows in fp32, and normed ones before their scale."""
        return width * PRECISE + self._fp32_copy(width)

    def _let_go(self, width: int) -> int:
        """The residual itself, where such norms keep a copy of it in fp32."""
        return width * self.element_bytes if self.element_bytes < PRECISE else 0

    @property
    def _scaled(self) -> bool:
        """Whether latents are scaled by a norm's statistic after their exchange."""
        return self.strategy == "btp" and self.parallelism.norm != "sync"

    @property
    def _products(self) -> int:
        """Matrix products that a norm precedes."""
        return 2 if self.strategy == "fullrank" or self.parallelism.group_projections else _NORMED

    @property
    def _normed_pieces(self) -> int:
        """In how many pieces of one width (``nn.bottleneck``) their latents go on."""
        if not self.parallelism.group_projections:
            return _NORMED
        return 2 if self._query == self._key_value else 3

    @property
    def _size(self) -> int:
        return self.parallelism.tensor_parallel_size

    @property
    def _split(self) -> int:
        """In how many parts heads and MLP are."""
        return 1 if self.strategy == "vanilla" else self._size

    @property
    def _query(self) -> int:
        return self.model.hidden_size // self._split

    @property
    def _key_value(self) -> int:
        return self.model.key_value_size // self._split

    @property
    def _mlp(self) -> int:
        return self.model.intermediate_size // self._split

    @property
    def _heads(self) -> int:
        return self.model.num_attention_heads // self._split
