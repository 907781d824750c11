import gc
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks
from tests.used import module_name, starts_cluster

# How long an example takes depends on the machine, and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Two processes share the tests: one takes what starts a cluster, one by one, the other all else, file by file."""
    clustered = {path: starts_cluster(module_name(path)) for path in {item.path for item in items}}
    items.sort(key=lambda item: not clustered[item.path])
    for item in items:
        item.add_marker(pytest.mark.xdist_group("cluster" if clustered[item.path] else item.path.stem))
    yield


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
    pool = Ranks()
    # Triton decides when it is imported; the pool's processes start when there is work for them.
    with patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}):
        pool.run(2, torch.cuda.is_available)
    yield pool
    pool.close()
