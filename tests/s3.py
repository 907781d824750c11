"""A real S3 server for tests: SeaweedFS from its PyPI wheel, on loopback ports of its own."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "checkpoints"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}


# SeaweedFS also takes each port + 10000. Both are above Ray's ports for workers and below those that Linux gives to
# connections, which would take one between the look at it and the start.
PORTS = range(20_000, 22_700)


def free_ports(count: int) -> list[int]:
    """Free ports for a server, from the part of ``PORTS`` that this process of pytest-xdist has to itself."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    mine = PORTS[worker::workers]
    start = os.getpid() * count % len(mine)
    candidates = (port for port in (*mine[start:], *mine[:start]) if _is_free(port) and _is_free(port + 10_000))
    return list(itertools.islice(candidates, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class S3Server:
    """A running server; ``environment`` has the variables that make s3fs use it."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._command, self._log, self.environment = command, log, environment
        self.start()

    def start(self, secret: str = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]) -> None:
        """Start it, with what it kept from before, and wait until it answers; with another secret it denies us all."""
        environment = os.environ | CREDENTIALS | {"AWS_SECRET_ACCESS_KEY": secret}
        with self._log.open("a") as stream:
            self._process = subprocess.Popen(self._command, stdout=stream, stderr=stream, env=environment)
        _wait_until_it_answers(self._process, self.environment | {"AWS_SECRET_ACCESS_KEY": secret}, self._log)

    def stop(self) -> None:
        """Kill it; what it has stored stays."""
        self._process.kill()
        self._process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Run a server that keeps what it stores in a folder."""
    s3, master, volume, filer, admin = free_ports(5)
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or "weed"
    command = [
        weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={s3}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}",
        "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false", f"-bucket={BUCKET}",
    ]  # fmt: skip
    environment = CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3}", "AWS_DEFAULT_REGION": "us-east-1"}
    server = S3Server(command, environment, folder / "weed.log")
    try:
        yield server
    finally:
        server.stop()


def _wait_until_it_answers(process: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    probe = "import s3fs, sys; sys.exit(0 if s3fs.S3FileSystem().exists(sys.argv[1]) else 1)"
    deadline = time.monotonic() + 60
    command = [sys.executable, "-c", probe, BUCKET]
    while subprocess.run(command, env=os.environ | environment, capture_output=True).returncode:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
