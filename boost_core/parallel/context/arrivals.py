"""Keys under way to a rank, stage by stage."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from boost_core.parallel.context.stage import BothAttentions, Came, Own, Stage


class Arrivals:
    """What the stages of one layer bring, forward or backward; some are under way from the start.

    Args:
        own: What this rank sends.
        attention: Attention to its own keys.
        stages: The stages.
        ahead: How many are in flight at once.

    Attributes:
        own: As given.
    """

    def __init__(self, own: Own, attention: BothAttentions, stages: Sequence[Stage], ahead: int) -> None:
        self.own, self._attention = own, attention
        self._left = iter(stages)
        self._under_way: deque[tuple[Stage, Callable[[], Callable[[], Came]]]] = deque()
        for _ in range(ahead):
            self._start_next()

    def __iter__(self) -> Iterator[tuple[Stage | None, BothAttentions, Came]]:
        """Each stage with what it brings, the rank's own keys first, while later stages are in flight; once."""
        yield None, self._attention, Came(self.own.keys, None)
        while self._under_way:
            stage, wait = self._under_way.popleft()
            make = wait()
            self._start_next()
            yield stage, stage.attention, make()

    def _start_next(self) -> None:
        stage = next(self._left, None)
        if stage is not None:
            self._under_way.append((stage, stage.start(self.own)))
