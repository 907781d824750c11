import pytest

from tests.mock_gpu import TORCH, MockGpu, build


@pytest.fixture(scope="session")
def mock() -> MockGpu:
    """The mock for the pinned torch."""
    return build(TORCH[0])


@pytest.fixture(scope="module", params=[TORCH[0], pytest.param(TORCH[1], marks=pytest.mark.nightly)])
def each_mock(request: pytest.FixtureRequest) -> MockGpu:
    """The mock for each version of torch."""
    return build(request.param)
