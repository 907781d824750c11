"""How the ranks of a gang are laid out: the one value that job files, plan, scheduler, gang and metrics mean by it."""

from dataclasses import dataclass
from typing import Protocol


class ParallelSizes(Protocol):
    """What states the sizes under the names of the job file: its ``parallelism``, and reports of what a gang has."""

    @property
    def tensor_parallel_size(self) -> int: ...  # noqa: D102

    @property
    def pipeline_parallel_size(self) -> int: ...  # noqa: D102

    @property
    def data_parallel_size(self) -> int: ...  # noqa: D102

    @property
    def context_parallel_size(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, order=True)
class Layout:
    """How many ranks a gang has along each dimension.

    Attributes:
        tp: Tensor parallel ranks; a group of them shares a node.
        pp: Pipeline parallel ranks: tensor parallel groups per replica.
        dp: Data parallel ranks: replicas of the gang.
        cp: Context parallel ranks, to which a replica's tensor parallel groups deal the tokens of a sequence.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1

    @classmethod
    def of(cls, sizes: ParallelSizes) -> "Layout":
        """That of a configuration or a report."""
        return cls(
            sizes.tensor_parallel_size,
            sizes.pipeline_parallel_size,
            sizes.data_parallel_size,
            sizes.context_parallel_size,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes under the names of the job file."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "context_parallel_size": self.cp,
        }

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def same_weights(self) -> int:
        """Ranks with the same weights, which share their state and sum up their gradients."""
        return self.dp * self.cp

    @property
    def per_replica(self) -> "Layout":
        """The layout of each replica, which stays the same while replicas come and go."""
        return Layout(self.tp, self.pp, dp=1, cp=self.cp)

    @property
    def replica_text(self) -> str:
        """The part of the text form that all its replicas share."""
        context = f" × cp {self.cp}" if self.cp > 1 else ""
        return f"tp {self.tp} × pp {self.pp}{context}"

    def coordinates(self, rank: int) -> "Layout":
        """A rank's tensor, pipeline, data and context parallel ranks; the first are innermost, then the last."""
        group, tp = divmod(rank, self.tp)
        stage, cp = divmod(group, self.cp)
        dp, pp = divmod(stage, self.pp)
        return Layout(tp, pp, dp, cp)

    def __str__(self) -> str:
        return f"{self.replica_text} × dp {self.dp}"
