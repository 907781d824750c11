"""Starts a Ray worker as a fork of the node's fork server, or as its own process if no server is available.

Ray runs this script instead of the Python interpreter, with its arguments and the worker's environment. The script
imports little, and nothing of BOOST. Until the worker has registered, Ray takes this process for it; so it lives as
long as the worker, and the worker ends when Ray kills this process.
"""
# pathlib would take as long to import as everything else here.
# ruff: noqa: PTH102, PTH108, PTH109

import contextlib
import fcntl
import hashlib
import json
import os
import select
import socket
import sys

SERVER = "service.gang.ray.fork_server"
START_SECONDS = 40.0  # for a server to come up; Ray waits 60 s for a worker to register
TRIES = 2  # a server may end while it is asked
BACKLOG = 1024  # workers that may wait meanwhile


def main() -> None:
    """Become the worker, or stand in for it: a fork that the server makes, which does not outlive this process."""
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    pid = 0
    for _ in range(TRIES):
        try:
            folder, address = _server_of(sys.argv[1:])
            server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            server.settimeout(START_SECONDS)
            try:
                server.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                fcntl.flock(folder, fcntl.LOCK_EX)  # until this process closes it; only one process starts the server
                try:
                    server.connect(address)
                except (FileNotFoundError, ConnectionRefusedError) as error:
                    if isinstance(error, ConnectionRefusedError):  # the server has ended
                        os.unlink(address)
                    _start_server(address)
                    server.connect(address)
            finally:
                os.close(folder)  # also before another try, which would wait for its own lock
            socket.send_fds(server, [request], [0, 1, 2])
            answer = server.recv(32)
        except ConnectionError:
            continue
        except (OSError, ValueError):
            break
        if answer:
            server.detach()  # left open
            pid = int(answer)
            break
    if not pid:  # no server is available
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    try:
        worker = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([worker], [], [])


def _server_of(arguments: list[str]) -> tuple[int, str]:
    """Open the folder of a node's servers, next to Ray's sockets; only this user can open what is in it.

    Returns:
        The folder, and the address of a server there, while the folder is open. The server's name differs between
        interpreters, installations and environments. It also differs between drivers: Ray reads its job's ID from the
        environment once per process, and forks keep it.

    Raises:
        OSError: The folder cannot be created or opened.
        ValueError: The arguments do not say where Ray's sockets are.
    """
    (raylet,) = (each for each in arguments if each.startswith("--raylet-name="))
    path = raylet.partition("=")[2] + ".forks"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(folder)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:  # Ray lets all users write next to its sockets
        raise PermissionError(f"{path} does not belong to this user alone")
    environment = sorted(os.environ.items())
    name = hashlib.sha256(json.dumps([sys.executable, __file__, environment]).encode()).hexdigest()[:16]
    return folder, f"/proc/self/fd/{folder}/{name}"  # a socket's path must be short


def _start_server(address: str) -> None:
    """Start a server; it accepts connections from now on."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(BACKLOG)
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if not os.fork():
            os.dup2(listener.fileno(), 0)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            # `ray stop` recognises it by its arguments, whose space also holds the title that Ray gives a fork.
            os.execv(sys.executable, [sys.executable, "-P", "-m", SERVER, *sys.argv[1:]])
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
