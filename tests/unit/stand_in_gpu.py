"""A stand-in of a GPU's streams that run in any order."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch


class Stream:
    """Work in the order in which it was queued; each says whether it could be done yet."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], bool]] = []

    def queue(self, work: Callable[[], object]) -> None:
        self.queued.append(lambda: (work(), True)[1])

    def wait_event(self, event: "Event") -> None:
        self.queued.append(lambda: event.reached)

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def advances(self) -> bool:
        done = bool(self.queued) and self.queued[0]()
        if done:
            del self.queued[0]
        return done


class Event:
    def __init__(self) -> None:
        self.reached = False

    def record(self, stream: Stream) -> None:
        stream.queue(lambda: setattr(self, "reached", True))


class Gpu:
    """Does nothing until all is queued, and then one thing at a time of any stream."""

    def __init__(self) -> None:
        self.current = Stream()
        self.streams = [self.current]

    def new_stream(self, _: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, order: random.Random) -> None:
        while any(stream.queued for stream in self.streams):
            order.shuffle(self.streams)
            assert any(stream.advances() for stream in self.streams), "they wait for each other"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """One whose streams and events torch gives out."""
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Stream", gpu.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: gpu.current)
    return gpu
