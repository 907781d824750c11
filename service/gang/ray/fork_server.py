"""Starts a node's worker processes as forks of itself, so that none spends seconds importing torch.

Workers are ranks and holders of spare copies.

There is one per Ray node and worker environment. The first worker that needs it starts it
(``fork_client.py``); it ends with the node's Ray, or after a while without forks. If it is killed, its forks
live on, and the next worker starts another server.

A fork shares the server's memory (copy on write) and nothing else: no thread, as the server has only
one, no file, and no GPU, as the server never touches one.
"""

import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from service.gang.ray import fork_client

PRELOADED = (
    "service.gang.ray_train.rank_worker", "service.gang.worker.worker", "service.gang.ray.supervisor",
    "boost_core.config.s3",
)  # fmt: skip
ONE_THREAD = {  # of libraries that would start threads on import
    "OPENBLAS_NUM_THREADS": "1",  # numpy
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow
}
IDLE_SECONDS = 300.0  # without a fork, after which a server ends
REQUEST_SECONDS = 5.0  # for a connected client to send its request
REQUEST_BYTES = 2**20
# The command that Ray runs instead of the interpreter, on every node.
PYTHON_OF_FORKS = shlex.join([sys.executable, "-I", "-S", fork_client.__file__])


@dataclass(frozen=True)
class Request:
    """A request for a fork.

    Attributes:
        arguments: The program to run, and its arguments.
        folder: Its working directory.
        environment: Its entire environment.
        files: Its standard input, output and error.
    """

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]


@dataclass
class Fork:
    """A running fork.

    Attributes:
        process: Its pidfd.
        client: The connection to the process it was made for; ``None`` once that has ended.
    """

    process: int
    client: socket.socket | None

    def close(self) -> None:
        """Close the files."""
        os.close(self.process)
        if self.client:
            self.client.close()


def _loaded_files() -> dict[str, int]:
    """Return the modification times of all imported files, in nanoseconds since 1970."""
    changed: dict[str, int] = {}
    for module in list(sys.modules.values()):
        if path := getattr(module, "__dict__", {}).get("__file__"):
            with suppress(OSError):
                changed[path] = Path(path).stat().st_mtime_ns
    return changed


@dataclass
class ForkServer:
    """Forks on request.

    Args:
        listener: The socket that receives requests.
        owner: The pidfd of the process that it ends with.
    """

    listener: socket.socket
    owner: int
    _forks: list[Fork] = field(default_factory=list)
    _loaded: dict[str, int] = field(default_factory=_loaded_files)

    def serve(self) -> Request | None:
        """Serve requests; return the request in each fork, and ``None`` in the server when it ends."""
        while True:
            poll = select.poll()
            clients = [fork.client.fileno() for fork in self._forks if fork.client]
            for file in (self.listener.fileno(), self.owner, *(fork.process for fork in self._forks), *clients):
                poll.register(file, select.POLLIN)
            ready = {file for file, _ in poll.poll(None if self._forks else 1000 * IDLE_SECONDS)}
            if not ready:
                return None
            if self.owner in ready:
                for fork in self._forks:
                    signal.pidfd_send_signal(fork.process, signal.SIGKILL)
                return None
            for fork in list(self._forks):
                if fork.process in ready:
                    os.waitid(os.P_PIDFD, fork.process, os.WEXITED)
                    self._forks.remove(fork)
                    fork.close()
                elif fork.client and fork.client.fileno() in ready:  # a client sends nothing more, so it has ended
                    signal.pidfd_send_signal(fork.process, signal.SIGKILL)
                    fork.client.close()
                    fork.client = None
            if self.listener.fileno() in ready:
                if self._loaded != _loaded_files():  # the installation has changed; the next server loads the new one
                    return None
                client, _ = self.listener.accept()
                client.settimeout(REQUEST_SECONDS)
                try:
                    text, files, _, _ = socket.recv_fds(client, REQUEST_BYTES, 3)
                    arguments, folder, environment = json.loads(text)
                    request = Request(arguments, folder, environment, files)
                except (OSError, ValueError):  # the client has given up
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:  # the fork, which closes everything that the server has open
                    client.close()
                    self.listener.close()
                    os.close(self.owner)
                    for fork in self._forks:
                        fork.close()
                    return request
                for file in request.files:
                    os.close(file)
                self._forks.append(Fork(os.pidfd_open(pid), client))
                with suppress(OSError):  # the client has given up
                    client.send(str(pid).encode())


def become(request: Request) -> None:
    """Become the requested process, as if it had been started on its own."""
    import numpy as np

    os.setpgid(0, 0)
    for number, file in enumerate(request.files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    np.random.seed()  # Python's own generator reseeds itself after a fork
    sys.argv = request.arguments
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Serve the socket on standard input, until a fork becomes a worker or the server ends."""
    listener = socket.socket(fileno=os.dup(0))
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.update(ONE_THREAD)
    from service.gang.ray.private_api import OF_A_WORKER, no_random_ids

    with no_random_ids():
        for module in (*PRELOADED, *OF_A_WORKER):  # what ranks need
            importlib.import_module(module)
    reasons = []  # why this process must not be forked
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        reasons.append(f"it has {threads} threads")
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(path := file.readlink()).startswith("/dev/nvidia"):
                reasons.append(f"it has opened {path}")
    if reasons:
        sys.exit(f"The fork server cannot be forked, so workers start without it: {' and '.join(reasons)}.")
    gc.collect()
    gc.freeze()  # otherwise garbage collection would write to memory that the forks share
    if request := ForkServer(listener, raylet).serve():
        become(request)


if __name__ == "__main__":
    main()
