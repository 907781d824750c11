"""A real MLflow server for tests, on a loopback port of its own, which keeps runs in a database."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from mlflow.tracking import MlflowClient

SECONDS_TO_START = 120


class MlflowServer:
    """A running server.

    Attributes:
        url: Its address.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.url, self._log = f"http://127.0.0.1:{port}", folder / "mlflow.log"
        self._command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
            "--default-artifact-root", str(folder / "artifacts"), "--host", "127.0.0.1", "--port", str(port),
            "--workers", "1",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        """Start it, with what it kept from before, and wait until it answers."""
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=os.environ | quiet, start_new_session=True
            )
        deadline = time.monotonic() + SECONDS_TO_START
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.2)

    def kill(self) -> None:
        """Kill it with all its workers; what it has stored stays."""
        os.killpg(self._process.pid, 9)
        self._process.wait()

    def client(self) -> MlflowClient:
        """MLflow's own client of it."""
        return MlflowClient(self.url)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[MlflowServer]:
    """Run a server that keeps what it stores in a folder."""
    server = MlflowServer(folder, port)
    try:
        yield server
    finally:
        server.kill()
