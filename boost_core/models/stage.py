"""A pipeline stage: some of a model's blocks, with one of its ends or neither.

Stages pass on the residual stream, of which each tensor parallel rank sends its own part, and under LaX the latents
that cross into the next block. Shape suffixes: T tokens, d hidden.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from boost_core.architecture.projections import projection_groups
from boost_core.config import ModelConfig
from boost_core.models.decoder import Decoder
from boost_core.nn.attention import Rotation
from boost_core.plan.stages import Stage

Shape = tuple[int, ...]


class StageModule(nn.Module):
    """A stage as a module of tensors in, tensors out.

    Args:
        decoder: This rank's part of the model, which remains the owner of the weights.
        model: The model's shape.
        stage: Which of its blocks and ends.
        grouped: Whether projections with a common input share an exchange.

    Attributes:
        stage: As given.
        rotations: The positions of each micro-batch's tokens, and how they attend; kept while the micro-batch is here.
    """

    def __init__(self, decoder: Decoder, model: ModelConfig, stage: Stage, grouped: bool) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple, so that the weights are registered only once
        self.stage, self._width = stage, decoder.strategy.width(model.hidden_size)
        self.rotations: Sequence[Rotation] = ()
        self._blocks = [str(layer) for layer in stage.layers]
        self._takes = model.crosses_into(stage.layers.start)
        self._gives = not stage.last and model.crosses_into(stage.layers.stop)
        # Number of latents of width r in each tensor of a ``Carried``.
        self._rank = model.rank or 0
        self._carried = [[len(piece) for piece in group.pieces(grouped)] for group in projection_groups(model)]

    def forward(self, *inputs: torch.Tensor, number_1: torch.Tensor, target_T: torch.Tensor | None = None) -> Any:
        """Map tokens ``[T]`` in the first stage, else the previous stage's output; the last returns losses ``[T]``.

        ``number_1`` is the micro-batch's number, on the host.
        """
        (decoder,) = self._decoder
        if self.stage.first:
            residual, carried = decoder.embed(inputs[0]), None
        else:
            residual, carried = decoder.strategy.enter(inputs[0]), self._unpacked(inputs[1:])
        residual, carried = decoder.through(self._blocks, residual, carried, self.rotations[int(number_1)])
        if not self.stage.last:
            given = carried if self._gives and carried is not None else ()
            crossing = [each.flatten().view(each.shape) for part in given for each in part]
            return (residual.inputs, *crossing)
        if target_T is None:
            raise AssertionError("the last stage needs the targets")
        return decoder.losses(residual, target_T)

    def input_shapes(self, tokens: int) -> list[Shape]:
        """Shapes of the inputs for ``tokens`` tokens."""
        return [(tokens,)] if self.stage.first else [(tokens, self._width), *self._crossing(self._takes, tokens)]

    def output_shapes(self, tokens: int) -> list[Shape]:
        """Shapes of the outputs."""
        return [(tokens,)] if self.stage.last else [(tokens, self._width), *self._crossing(self._gives, tokens)]

    def _crossing(self, crosses: bool, tokens: int) -> Iterator[Shape]:
        for counts in self._carried if crosses else ():
            yield from ((count, tokens, self._rank) for count in counts)

    def _unpacked(self, latents: tuple[torch.Tensor, ...]) -> Any:
        """The incoming latents as ``Carried``; ``None`` where nothing crosses."""
        if not self._takes:
            return None
        rest = iter(latents)
        return tuple([next(rest) for _ in counts] for counts in self._carried)
