"""Faults that a rank's process injects into itself on request."""

import errno
import os
import signal
import threading
import time

from boost_core.messages import Drill


class Drills:
    """The drills given to a process. Threads may share it."""

    def __init__(self) -> None:
        self._waiting: list[Drill] = []
        self._step = 0
        self._lock = threading.Lock()
        self._full_until = 0.0
        self._late = (0, 0.0)  # number of steps, and delay of each in seconds

    def add(self, drill: Drill) -> None:
        """Take a drill; one without a step starts immediately."""
        with self._lock:
            if drill.at_step is None or drill.at_step <= self._step:
                self._begin(drill)
            else:
                self._waiting.append(drill)

    def after_step(self, step: int) -> None:
        """Start what is due after a step, and delay it if a drill says so."""
        with self._lock:
            self._step = step
            due = [drill for drill in self._waiting if drill.at_step is not None and drill.at_step <= step]
            self._waiting = [drill for drill in self._waiting if drill not in due]
            for drill in due:
                self._begin(drill)
            steps, seconds = self._late
            self._late = (max(0, steps - 1), seconds)
        if steps:
            time.sleep(seconds)

    def before_save(self) -> None:
        """Refuse to write while a drill makes the store full.

        Raises:
            OSError: The store is full.
        """
        if time.monotonic() < self._full_until:
            raise OSError(errno.ENOSPC, "the store is full, by a drill")

    def _begin(self, drill: Drill) -> None:
        match drill.kind:
            case "kill_rank" | "drop_node":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang_rank":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay_rank":
                self._late = (drill.steps, drill.seconds)
            case "fill_store":
                self._full_until = time.monotonic() + drill.seconds
