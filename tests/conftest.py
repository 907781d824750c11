import gc
import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings

from tests.ranks import Ranks

# How long an example takes depends on the machine, and says nothing about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


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
