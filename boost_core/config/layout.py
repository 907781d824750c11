"""How the ranks of a gang are laid out: one type for job files, plan, scheduler, gang and metrics."""

from dataclasses import dataclass
from typing import Protocol


class ParallelSizes(Protocol):
    """Anything with the sizes under the job file's names: a job's ``parallelism``, and reports on a gang."""

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
    """The number of ranks of a gang along each dimension.

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
        """The layout given by a configuration or a report."""
        return cls(
            sizes.tensor_parallel_size,
            sizes.pipeline_parallel_size,
            sizes.data_parallel_size,
            sizes.context_parallel_size,
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes under the job file's names."""
        return {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "context_parallel_size": self.cp,
        }

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def same_weights(self) -> int:
        """Number of ranks with the same weights, which share their state and sum their gradients."""
        return self.dp * self.cp

    @property
    def per_replica(self) -> "Layout":
        """The layout of one replica, which stays the same as replicas come and go."""
        return Layout(self.tp, self.pp, dp=1, cp=self.cp)

    @property
    def replica_text(self) -> str:
        """The part of the text form that all its replicas share."""
        context = f" × cp {self.cp}" if self.cp > 1 else ""
        return f"tp {self.tp} × pp {self.pp}{context}"

    def coordinates(self, rank: int) -> "Layout":
        """A rank's tensor, pipeline, data and context parallel ranks; tp varies fastest, then cp, pp and dp."""
        group, tp = divmod(rank, self.tp)
        stage, cp = divmod(group, self.cp)
        dp, pp = divmod(stage, self.pp)
        return Layout(tp, pp, dp, cp)

    def __str__(self) -> str:
        return f"{self.replica_text} × dp {self.dp}"
