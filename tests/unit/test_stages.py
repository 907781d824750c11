import pytest

from boost_core.architecture import cut
from boost_core.config import ModelConfig, ParallelismConfig


def sizes(stages: int, schedule: str = "1f1b", layers: list[int] | None = None, **model: object) -> list[int]:
    config = ModelConfig.model_validate({"preset": "7b", "family": "cola", "vocab_size": 32_000, **model})
    parallelism = ParallelismConfig.model_validate(
        {"pipeline_parallel_size": stages, "pipeline_schedule": schedule, "pipeline_layers_per_stage": layers}
    )
    found = cut(config, parallelism, 4096)
    assert [stage.index for stage in found] == list(range(len(found)))
    assert [stage.first for stage in found] == [True] + [False] * (len(found) - 1)
    assert [stage.last for stage in found] == [False] * (len(found) - 1) + [True]
    assert [layer for stage in found for layer in stage.layers] == list(range(config.num_hidden_layers))
    return [len(stage.layers) for stage in found]


def test_one_stage_has_everything() -> None:
    assert sizes(1) == [32]


def test_the_head_counts() -> None:
    # 7B's low-rank block takes 6·78 M + 12·4096² = 686 MFLOPs a token, the head 786: about one block.
    assert sizes(2) == [17, 15]
    assert sizes(4) == [8, 8, 9, 7]
    assert sizes(4, num_hidden_layers=4) == [1, 1, 1, 1]


def test_a_large_vocabulary_leaves_the_last_stage_few_blocks() -> None:
    # Nine blocks' worth of head, on top of one.
    assert sizes(4, vocab_size=256_000) == [10, 10, 11, 1]


def test_two_stages_a_rank() -> None:
    assert len(sizes(4, "interleaved_1f1b")) == 8


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ValueError, match="the model has 3"):
        sizes(4, num_hidden_layers=3)


def test_stages_are_as_the_job_lists_them() -> None:
    assert sizes(2, layers=[20, 12]) == [20, 12]
    assert sizes(2, "zero_bubble", layers=[7, 9, 12, 4]) == [7, 9, 12, 4]
