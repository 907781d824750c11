"""Detects hanging gangs, slow ranks, nodes that leave or are gone, and too frequent faults. Pure."""

import statistics
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from boost_core.config import FaultToleranceConfig
from boost_core.config.job import MOST_LOSSES
from boost_core.messages import Cause

_WINDOW = 10  # steps
_RANKS_SECONDS = 2.0  # between two reports of all ranks' times
_URGENT_SECONDS = 20.0  # before a node goes away
_SILENT_SECONDS = 300.0  # to avoid a node that took no connection; by then the cluster knows whether it is gone
_NOTICE_SECONDS = 60.0  # assumed notice if a leaving node gives no deadline
_LONGEST_PAUSE = 60.0  # seconds before a gang that makes no progress is formed again
_FIRST_STEP = 5  # how many times longer than a later step it may take: kernels are compiled, the state is loaded


@dataclass(frozen=True)
class Heartbeat:
    """The newest step of a rank.

    Attributes:
        step: Steps done.
        seconds: How long the step took.
        busy_seconds: The time that was not spent waiting for other ranks.
    """

    step: int
    seconds: float
    busy_seconds: float


class SlowRank(NamedTuple):
    """A rank that the others wait for.

    Attributes:
        rank: The rank.
        share: Share of the step in which it computed.
        times: Its computing time divided by the median rank's.
    """

    rank: int
    share: float
    times: float


@dataclass(slots=True)
class RankTimes:
    """A rank's newest steps, and its times since they were reported last: the same memory however long it trains.

    Attributes:
        steps: Number of its steps.
        median: The median of its busy seconds over the window; ``None`` before it has done as many steps.
        busy_sum: Sum of its busy seconds since the last report.
        unreported: Number of steps since then.
        seconds: Duration of each step in the window.
        busy: Its busy seconds in each of them.
    """

    steps: int = 0
    median: float | None = None
    busy_sum: float = 0.0
    unreported: int = 0
    seconds: "array[float]" = field(default_factory=lambda: array("d", [0.0] * _WINDOW))
    busy: "array[float]" = field(default_factory=lambda: array("d", [0.0] * _WINDOW))


class GangWatch:
    """Watches one gang.

    Args:
        config: What counts as hanging and as slow.
        now: When it was formed, in seconds of the same clock as all other times.
    """

    def __init__(self, config: FaultToleranceConfig, now: float) -> None:
        self._config = config
        self._progress, self._step = now, 0
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._ranks: dict[int, RankTimes] = defaultdict(RankTimes)
        self._slow: set[int] = set()
        self._has_news = False  # since ``newly_slow`` was called last
        self._unreported = 0  # number of ranks that have done a step since the last report
        self._reported = now

    def progress(self, now: float) -> None:
        """Take note of progress other than a step."""
        self._progress = max(self._progress, now)

    def beat(self, rank: int, beat: Heartbeat, now: float) -> None:
        """Take note of a step of a rank."""
        times = self._ranks[rank]
        self._unreported += times.unreported == 0
        place = times.steps % _WINDOW
        times.seconds[place], times.busy[place] = beat.seconds, beat.busy_seconds
        times.steps += 1
        if times.steps >= _WINDOW:
            times.median = statistics.median(times.busy)
        times.busy_sum += beat.busy_seconds
        times.unreported += 1
        self._has_news = True
        self.progress(now)  # including a step repeated after a rollback
        if beat.step > self._step:
            self._step = beat.step
            self._seconds.append(beat.seconds)

    def hangs(self, now: float) -> float | None:
        """Return how long nothing has happened, if that is too long."""
        limit = self._config.hang_seconds * _FIRST_STEP
        if self._seconds:
            limit = max(self._config.hang_seconds, self._config.hang_factor * statistics.median(self._seconds))
        silent = now - self._progress
        return silent if silent > limit else None

    def rank_times(self, ranks: int, now: float) -> list[float] | None:
        """Return each rank's mean busy seconds since the last report; ``None`` until they are due and complete.

        Args:
            ranks: Number of ranks.
            now: The present time.
        """
        if now < self._reported + _RANKS_SECONDS or self._unreported < ranks:
            return None
        times = []
        for rank in range(ranks):
            of_rank = self._ranks[rank]
            times.append(of_rank.busy_sum / of_rank.unreported)
            of_rank.busy_sum, of_rank.unreported = 0.0, 0
        self._reported, self._unreported = now, 0
        return times

    def newly_slow(self) -> list[SlowRank]:
        """Return ranks that have become slow, each only once until it is fast again."""
        if not self._has_news:
            return []
        self._has_news = False
        busy = {rank: times.median for rank, times in self._ranks.items() if times.median is not None}
        if len(busy) < 2:
            return []
        usual = statistics.median_low(busy.values())
        slow = {rank for rank, seconds in busy.items() if seconds > self._config.slow_rank_factor * usual}
        fresh, self._slow = slow - self._slow, slow
        # The share of its median step in which each computes.
        shares = {rank: busy[rank] / statistics.median(self._ranks[rank].seconds) for rank in sorted(fresh)}
        return [SlowRank(rank, share, busy[rank] / usual) for rank, share in shares.items()]


@dataclass
class RestartLimit:
    """Counts restarts in a time window: those for faults of the job's own, and those for lost nodes.

    Lost nodes count only as long as no new checkpoint is stored.

    Args:
        config: The limit and the window.
    """

    config: FaultToleranceConfig
    _faults: deque[float] = field(default_factory=deque)
    _losses: deque[float] = field(default_factory=deque)
    _stored_at_loss: int = -1  # step of the newest checkpoint at the previous loss

    def exceeded(self, cause: Cause, now: float, stored_step: int) -> str | None:
        """Record a fault; return what was exceeded, in words, if it is one too many.

        Args:
            cause: What happened.
            now: The time, in seconds.
            stored_step: Step of the newest checkpoint; -1 without one.
        """
        policy = self.config
        lost = cause is Cause.NODE_LOST
        if lost:
            if stored_step > self._stored_at_loss:
                self._losses.clear()
            self._stored_at_loss = stored_step
        times, most = (self._losses, MOST_LOSSES) if lost else (self._faults, policy.max_restarts)
        times.append(now)
        while times[0] < now - policy.restart_window_seconds:
            times.popleft()
        if len(times) <= most:
            return None
        within = f"within {policy.restart_window_seconds:g} s"
        if lost:
            return f"{most + 1} lost nodes {within} without a new checkpoint are more than a job survives"
        return f"{most + 1} faults {within} are more than fault_tolerance.max_restarts = {most} allows"

    @property
    def left(self) -> int:
        """Restarts after further faults of the job's own that are still allowed, without the one that is under way."""
        return max(0, self.config.max_restarts - len(self._faults))


@dataclass
class RestartPauses:
    """How long to wait before a gang is formed again after a fault of the job's own.

    Not at all if it has made progress since the previous fault; otherwise 1, 2, 4, … seconds, up to a minute.
    """

    _repeats: int = 0  # faults without progress in between
    _at_fault: tuple[int, int] | None = None  # most steps and the newest checkpoint at the previous fault

    def stalled(self, step: int, stored_step: int) -> bool:
        """Whether there was a fault before, and no progress since.

        Args:
            step: Most steps that were done so far.
            stored_step: Step of the newest checkpoint; -1 without one.
        """
        return self._at_fault is not None and step <= self._at_fault[0] and stored_step <= self._at_fault[1]

    def fault(self, step: int, stored_step: int) -> float:
        """Take note of a fault, and return the seconds to wait. Arguments as for ``stalled``."""
        before, stored_before = self._at_fault or (0, -1)
        self._repeats = 0 if step > before or stored_step > stored_before else self._repeats + 1
        self._at_fault = step, stored_step
        return min(2.0 ** (self._repeats - 1), _LONGEST_PAUSE) if self._repeats else 0.0


@dataclass
class NodeWatch:
    """Remembers which nodes will go away or are gone, including some that the cluster has not noticed yet.

    Attributes:
        quarantined: Until when nodes are treated as gone.
        leaving: By when each node that will go away must be left; from then on that is urgent.
    """

    quarantined: dict[str, float] = field(default_factory=dict)
    leaving: dict[str, float] = field(default_factory=dict)
    _silent: dict[str, float] = field(default_factory=dict)  # until when nodes count as dead that the cluster does not

    def see(self, alive: Collection[str], leaving: Mapping[str, float | None], now: float) -> None:
        """Take note of what the cluster reports.

        Args:
            alive: Nodes that it considers alive.
            leaving: Nodes that will go away, and when; ``None`` if not known.
            now: The present time.
        """
        self._silent = {node: until for node, until in self._silent.items() if node in alive and until > now}
        by = {node: now + _NOTICE_SECONDS if at is None else at - _URGENT_SECONDS for node, at in leaving.items()}
        # A later notice may leave less time, as a preemption during a drain by hand does.
        self.leaving = {node: min(self.leaving.get(node, inf), time) for node, time in by.items()}

    def probed(self, silent: Collection[str], dead: Collection[str], now: float) -> set[str]:
        """Take note of a probe's result, and return all nodes to be considered gone."""
        self._silent |= dict.fromkeys(silent, now + _SILENT_SECONDS)
        return {*silent, *dead, *(node for node, until in self.quarantined.items() if until > now)}

    def unusable(self, now: float) -> set[str]:
        """Nodes on which nothing should be placed."""
        return {*self._silent, *self.leaving, *(node for node, until in self.quarantined.items() if until > now)}
