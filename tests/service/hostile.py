"""Servers that take connections and then do not do what they should."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def hostile_server(*, trickles: bool = False) -> Iterator[str]:
    """One that accepts and never answers, or sends headers and then a byte now and again; its URL."""
    ended = threading.Event()
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            taken.append(connection)
            if trickles:
                threading.Thread(target=trickle, args=(connection,), daemon=True).start()

    def trickle(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(HEAD)
            while not ended.wait(0.2):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            for connection in taken:
                connection.close()


def until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
