"""Which of torch's kernels attention runs on, by generation of GPU: the same with each version of torch."""

import json

import pytest

from tests.mock_gpu import MockGpu

CHOICE = """
import json, torch
from boost_core.config import JobSpec
from boost_core.train.state import attention_backend

def chosen(**training):
    spec = JobSpec.model_validate({
        "name": "a", "model": {"preset": "7b"}, "resources": {"gpus_per_worker": 1},
        "training": {"steps": 1, "sequence_length": 4096, **training},
    })
    return attention_backend(spec, torch.device("cuda", 0))

print(json.dumps([chosen(precision="bf16"), chosen(precision="fp32")]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("arch", "chosen"), [(90, ["cudnn", "efficient"]), (80, ["flash", "efficient"])])
def test_attentions_kernels(each_mock: MockGpu, arch: int, chosen: list[str]) -> None:
    output = each_mock.run("-c", CHOICE, variables=each_mock.variables(arch=arch))
    assert json.loads(output.splitlines()[-1]) == chosen
