"""What is asked of torch's CUDA graphs, with torch's played."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from boost_core.train.step_graph import CudaGraph

Log = list[tuple[Any, ...]]


class Played:
    """A device that keeps a log of what it is given, and of the stream that it was given on."""

    def __init__(self) -> None:
        self.log: Log = []
        self.current = "default"

    def work(self) -> torch.Tensor:
        self.log.append(("work", self.current))
        return torch.ones(1)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.log.append(("capture", graph.name, pool, capture_error_mode))
        with self.stream(stream):
            yield
        self.log.append(("captured",))


class PlayedStream:
    def __init__(self, played: Played, name: str = "own") -> None:
        self._played, self.name = played, name

    def wait_stream(self, other: "PlayedStream") -> None:
        self._played.log.append((self.name, "waits for", other.name))


class PlayedGraph:
    name = "graph"

    def __init__(self, played: Played) -> None:
        self._played = played

    def pool(self) -> str:
        return "memory"

    def replay(self) -> None:
        self._played.log.append(("replay", self._played.current))

    def reset(self) -> None:
        self._played.log.append(("reset",))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: PlayedGraph(played))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: PlayedStream(played))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: PlayedStream(played, played.current))
    monkeypatch.setattr(torch.cuda, "stream", played.stream)
    monkeypatch.setattr(torch.cuda, "graph", played.graph)
    return played


def test_a_step_warms_up_on_the_stream_on_which_it_is_captured_and_is_replayed_where_all_else_is(
    played: Played,
) -> None:
    graph = CudaGraph()
    assert torch.equal(graph.warm(played.work), torch.ones(1))
    assert played.log == [("own", "waits for", "default"), ("work", "own"), ("default", "waits for", "own")]
    played.log.clear()
    graph.capture(played.work)
    graph.replay()
    graph.reset()
    assert played.log == [
        ("capture", "graph", None, "thread_local"), ("work", "own"), ("captured",), ("replay", "default"), ("reset",),
    ]  # fmt: skip


def test_one_beside_it_is_captured_on_the_same_stream_in_the_same_memory(played: Played) -> None:
    graph = CudaGraph()
    graph.capture(played.work)
    played.log.clear()
    graph.beside().capture(played.work)
    assert played.log == [("capture", "graph", "memory", "thread_local"), ("work", "own"), ("captured",)]
