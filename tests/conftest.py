import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.ranks import Ranks
from tests.used import ROOT, module_name, starts_cluster

# How long an example takes depends on the machine, and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


class ClusterApart(LoadScopeScheduling):
    """Of the processes that share the tests, one takes what starts a cluster, the others all else, file by file."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "cluster" if starts_cluster(module_name(ROOT / path)) else path


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set what all tests and the processes they start share."""
    # Processes share a few cores: threads of OpenMP that wait for one another's turn take ten times as long.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Each new client of HTTP reads all certificates of a file, which takes 30 ms, but of a folder those that it needs.
    os.environ.setdefault("SSL_CERT_DIR", "/etc/ssl/certs")
    # Programs print lines that tests can look for as a whole; test_cli_width is about those of terminals.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.get_terminal_writer().fullwidth = shutil.get_terminal_size().columns  # of pytest's own lines
    os.environ["COLUMNS"] = "500"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ClusterApart:
    return ClusterApart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests, begin with what takes longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not starts_cluster(module_name(item.path)))


def pytest_collection_finish() -> None:
    """Leave what is there for good out of each collection of garbage: half a second for all modules and tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def interpreting_ranks() -> Iterator[Ranks]:
    """Ranks in which Triton's kernels run: interpreted, where there is no GPU."""
    with patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}):
        pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
