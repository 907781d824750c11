"""What torch's CUDA build does on the mock: which numbers are right, and what is refused as CUDA refuses it."""

from typing import Any

import pytest

from tests.mock_gpu import TORCH, MockGpu, json_lines, trouble
from tests.mock_gpu.scenes import SCENES

WRONG = {  # what the mock reports of each
    "synchronising_in_a_capture": ["ILLEGAL in a capture: cudaStreamSynchronize"],
    "pageable_copy_in_a_capture": ["ILLEGAL in a capture: a copy from or to pageable memory"],
    "captured_event": ["ILLEGAL cudaEventQuery of a captured event"],
    "unjoined_stream": ["ILLEGAL end of a capture with stream", "not joined"],
    "cudnn": ["REFUSED cudnnCreate"],
}


@pytest.fixture(scope="module")
def results(each_mock: MockGpu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("scenes") / "log"
    output = each_mock.run("-m", "tests.mock_gpu.scenes", variables=each_mock.variables(log))
    results = {scene: {"error": error, "trouble": []} for scene, error in json_lines(output)}
    scene = ""
    for line in log.read_text().splitlines():
        if line.startswith("mark "):
            scene = line.removeprefix("mark ")
        if line in trouble(log):
            results[scene]["trouble"].append(line)
    return results


@pytest.mark.parametrize(
    "each_mock", [TORCH[0], pytest.param(TORCH[1], marks=pytest.mark.nightly)], indirect=True, scope="module"
)
@pytest.mark.parametrize("scene", SCENES)
def test_scene(results: dict[str, Any], scene: str) -> None:
    assert results[scene]["error"] is None, results[scene]["error"]
    text = "\n".join(results[scene]["trouble"])
    assert bool(text) == (scene in WRONG), text
    for part in WRONG.get(scene, []):
        assert part in text
