"""A rank's steps in every mode, warmed up, captured and replayed by torch's CUDA build without a forbidden call."""

from typing import Any

import pytest

from tests.mock_gpu import MockGpu, json_lines, trouble
from tests.mock_gpu.modes import MODES, REPLAYS, UNCAPTURED, WHOLE


@pytest.fixture(scope="module")
def results(each_mock: MockGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process saw of each mode, and what the mock logged meanwhile."""
    log = tmp_path_factory.mktemp("modes") / "log"
    output = each_mock.run("-m", "tests.mock_gpu.modes", variables=each_mock.variables(log))
    results = {result["mode"]: result for result in json_lines(output)}
    mode, wrong = "", dict[str, list[str]]()
    for line in log.read_text().splitlines():
        if line.startswith("mark "):
            mode = line.removeprefix("mark ").rpartition(", step")[0]
        wrong.setdefault(mode, []).append(line)
    for mode, lines in wrong.items():
        if mode:
            results[mode]["log"] = lines
    assert not trouble(log)
    return results


@pytest.mark.parametrize("mode", [*MODES, *WHOLE])
def test_a_step_is_warmed_up_captured_and_replayed(results: dict[str, dict[str, Any]], mode: str) -> None:
    result = results[mode]
    assert "error" not in result, result["error"]
    assert result["obstacle"] == UNCAPTURED.get(mode)
    replays = sum(line.startswith("replay") for line in result["log"])
    assert replays == (0 if mode in UNCAPTURED else REPLAYS[mode])


@pytest.mark.parametrize("mode", WHOLE)
def test_what_a_7b_rank_reserves_is_within_five_percent_of_the_plan(
    results: dict[str, dict[str, Any]], mode: str
) -> None:
    assert results[mode]["reserved"] == pytest.approx(results[mode]["planned"], rel=0.05)
