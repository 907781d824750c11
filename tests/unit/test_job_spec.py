import copy
import json
import math
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from boost_core.config import DataConfig, JobSpec, ModelConfig, load_job
from boost_core.messages import Cause

GOOD = {"name": "job", "model": {"preset": "tiny"}, "training": {"steps": 10}}


def changed(**sections) -> dict:
    job = copy.deepcopy(GOOD)
    for section, change in sections.items():
        job[section] = job.get(section, {}) | change if isinstance(change, dict) else change
    return job


def test_defaults_are_filled_in() -> None:
    spec = JobSpec.model_validate(GOOD)
    assert spec.parallelism.world_size == 1
    assert spec.model.hidden_size == 128
    assert [source.kind for source, _ in spec.data.sources] == ["standard_library"]


def test_a_preset_gives_way_to_what_stands_beside_it() -> None:
    model = ModelConfig.model_validate({"preset": "tiny", "rank": 16})
    assert (model.rank, model.hidden_size) == (16, 128)


def test_every_batch_of_a_warm_up_splits_among_the_replicas_of_every_layout() -> None:
    stages = [{"until_step": 3, "global_batch_size": 32}, {"until_step": 5, "global_batch_size": 48}]
    training = {"global_batch_size": 96, "micro_batch_size": 8, "batch_size_warmup": stages}
    spec = JobSpec.model_validate(
        changed(training=training, elasticity={"data_parallel_size": {"min": 1, "max": 12}})
    )  # fmt: skip
    assert [layout.dp for layout in spec.layouts()] == [1, 2]
    sizes = [spec.training.batch_size(step) for step in range(1, 11)]
    assert sizes == [32] * 3 + [48] * 2 + [96] * 5
    assert [spec.training.samples(steps) for steps in range(11)] == [sum(sizes[:steps]) for steps in range(11)]


def test_tokens_say_how_many_steps_to_do() -> None:
    for tokens, steps in (
        ("1M", 245),
        (1_000_000, 245),
        (1e6, 245),
        ("0.5K", 1),
        (4096, 1),
        (4097, 2),
        ("1.5 B", 366_211),
    ):
        spec = JobSpec.model_validate(GOOD | {"training": {"tokens": tokens}})
        assert spec.training.steps == steps
        assert spec.training.samples(steps - 1) * 256 < spec.training.tokens <= spec.training.samples(steps) * 256
        assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
        assert "steps" not in spec.as_written()["training"]
    stages = [{"until_step": 3, "global_batch_size": 32}, {"until_step": 5, "global_batch_size": 48}]
    for tokens in range(1, 1000 * 256, 199):
        training = {"tokens": tokens, "global_batch_size": 96, "batch_size_warmup": stages}
        spec = JobSpec.model_validate(GOOD | {"training": training})
        steps = spec.training.steps
        assert spec.training.samples(steps - 1) * 256 < tokens <= spec.training.samples(steps) * 256


def test_a_steered_job_has_the_values_of_each_step() -> None:
    spec = JobSpec.model_validate(changed(training={"steps": 100}, checkpoint={"url": "/x"}))
    colder = JobSpec.model_validate(changed(training={"steps": 245}, optimizer={"learning_rate": 1e-4}))
    last = JobSpec.model_validate(changed(training={"steps": 300}, checkpoint={"every_steps": 7}))
    spec = spec.steered_after(20, colder.steering, "alice", None).steered_after(50, last.steering, "bob", None)
    found = [
        (at.training.steps, at.optimizer.learning_rate, at.checkpoint.every_steps, at.checkpoint.url)
        for at in map(spec.at_step, (1, 20, 21, 50, 51, 300))
    ]
    first, second, third = (100, 3e-3, 100, "/x"), (245, 1e-4, 100, "/x"), (300, 3e-3, 7, "/x")
    assert found == [first, first, second, second, third, third]
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert "steered" not in spec.as_written()
    backwards = spec.model_dump(mode="json")
    backwards["steered"].reverse()
    with pytest.raises(ValidationError, match="until_step=20 comes after until_step=50"):
        JobSpec.model_validate(backwards)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("training", "steps", 0),
        ("training", "evaluate_every_steps", 0),
        ("optimizer", "learning_rate", math.nan),
        ("optimizer", "learning_rate", -1.0),
        ("optimizer", "decay_steps", 0),
        ("optimizer", "warmup_steps", -1),
        ("checkpoint", "every_steps", 0),
    ],
)
def test_what_a_job_file_says_of_earlier_values_is_checked(section: str, field: str, value: float) -> None:
    spec = JobSpec.model_validate(changed(training={"steps": 100}))
    content = spec.steered_after(20, spec.steering, "alice", None).model_dump(mode="json")
    content["steered"][0][section][field] = value
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(content)
    assert refused.value.errors()[0]["loc"] == ("steered", 0, section, field)


def test_a_batch_that_never_grows_is_refused_at_the_door_and_read_of_earlier_jobs(tmp_path: Path) -> None:
    stages = [{"until_step": 10, "global_batch_size": 32}]
    content = changed(
        training={"global_batch_size": 96, "micro_batch_size": 8, "steps": 10, "batch_size_warmup": stages}
    )
    assert JobSpec.model_validate(content).training.batch_size(10) == 32
    (tmp_path / "job.yaml").write_text(json.dumps(content))
    with pytest.raises(ValidationError, match="leaves no step for global_batch_size=96"):
        load_job(tmp_path / "job.yaml")


BAD = [
    (changed(checkpoint={"keep_every": 5}), "checkpoint.keep_every", "set keep_last, too"),
    (changed(checkpoint={"keep_last": 0}), "checkpoint.keep_last", "greater than or equal to 1"),
    (
        changed(parallelism={"recompute": "latent", "norm": "sync"}),
        "parallelism.recompute",
        "norm=sync has a collective between them: use norm=fused, or use none or full",
    ),
    (
        changed(parallelism={"recompute": "latent", "strategy": "vanilla"}),
        "parallelism.recompute",
        "vanilla exchanges wide vectors",
    ),
    (
        changed(parallelism={"split_micro_batch": True, "recompute": "full"}),
        "parallelism.split_micro_batch",
        "runs a block without pausing",
    ),
    (
        changed(parallelism={"split_micro_batch": True, "recompute": "latent"}, training={"micro_batch_size": 1}),
        "training.micro_batch_size",
        "cannot be split with recompute=latent; use 2 or more",
    ),
    (changed(optimizer={"kind": "loro"}), "optimizer.kind", "use family=svd or adamw"),
    (
        changed(optimizer={"kind": "loro"}, model={"family": "svd"}, parallelism={"strategy": "vanilla"}),
        "optimizer.kind",
        "use strategy=btp",
    ),
    (changed(optimizer={"loro": {}}), "optimizer.loro", "set kind=loro"),
    (changed(flavour=1), "flavour", "Extra inputs"),
    (changed(model={"preset": "huge"}), "model.preset", "choose one of tiny"),
    (changed(model={"rank": 129}), "model.rank", "usually hidden_size/4=32"),
    (changed(model={"num_attention_heads": 5}), "model.num_attention_heads", "does not split into 5 heads"),
    (changed(model={"num_attention_heads": 128}), "model.num_attention_heads", "even size"),
    (changed(model={"num_key_value_heads": 3}), "model.num_key_value_heads", "choose a divisor of 4"),
    (changed(model={"vocab_size": 100}), "model.vocab_size", "use at least 256"),
    (changed(model={"hiden_size": 64}), "model.hiden_size", "Extra inputs"),
    (changed(parallelism={"tensor_parallel_size": 3}), "parallelism.tensor_parallel_size", "use 1, 2, 4"),
    (changed(parallelism={"tensor_parallel_size": 8}), "parallelism.tensor_parallel_size", "num_attention_heads=4"),
    (changed(parallelism={"tensor_parallel_size": 0}), "parallelism.tensor_parallel_size", "greater than or equal"),
    (changed(parallelism={"pipeline_parallel_size": 32}), "parallelism.pipeline_parallel_size", "use fewer stages"),
    (changed(parallelism={"pipeline_schedule": "zero_bubble"}), "parallelism.pipeline_schedule", "leave it out"),
    (
        changed(parallelism={"pipeline_parallel_size": 2, "split_micro_batch": True}),
        "parallelism.split_micro_batch",
        "leave split_micro_batch out",
    ),
    (
        changed(
            parallelism={"pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble", "strategy": "vanilla"},
            training={"global_batch_size": 64},
        ),
        "parallelism.pipeline_schedule",
        "only btp supports",
    ),
    (
        changed(parallelism={"pipeline_parallel_size": 2}, training={"global_batch_size": 16, "micro_batch_size": 16}),
        "training.global_batch_size",
        "the batch gives 1",
    ),
    (
        changed(
            parallelism={"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b"},
            training={"global_batch_size": 24, "micro_batch_size": 8},
        ),
        "parallelism.pipeline_schedule",
        "a multiple of 2 micro-batches",
    ),
    (changed(training={"global_batch_size": 24}), "training.global_batch_size", "such as 32"),
    (
        changed(training={"sequence_length": 48 * 21839}, parallelism={"context_parallel_size": 48}),
        "parallelism.context_parallel_size",
        "use a multiple of 98304 such as 983040",  # as the next one is above the limit
    ),
    (changed(training={"steps": 0}), "training.steps", "greater than or equal"),
    (GOOD | {"training": {}}, "training.steps", "Field required"),
    (GOOD | {"training": {"tokens": "1G"}}, "training.tokens", "such as 300B or 1.5T"),
    (GOOD | {"training": {"tokens": True}}, "training.tokens", "valid integer"),
    (GOOD | {"training": {"tokens": "1000T"}}, "training.steps", "less than or equal"),
    (changed(training={"tokens": "1M"}), "training.steps", "takes 245 steps, not 10; leave one of the two out"),
    (changed(training={"precision": "fp16"}), "training.precision", "'fp32', 'bf16' or 'fp8'"),
    (changed(training={"precision": "fp8"}, model={"rank": 24}), "training.precision", "gives a rank 24 columns"),
    (
        changed(training={"precision": "fp8"}, parallelism={"strategy": "vanilla"}),
        "training.precision",
        "fp8 is for btp; vanilla computes in bf16",
    ),
    (changed(optimizer={"warmup_steps": 11}), "optimizer.warmup_steps", "training.steps=10"),
    (changed(optimizer={"learning_rate": -1}), "optimizer.learning_rate", "greater than 0"),
    (changed(data={"source": {"kind": "text"}}), "data.source.paths", "at least one path"),
    (changed(data={"source": {"paths": ["/x"]}}), "data.source.paths", "use kind=text"),
    (
        changed(data={"source": {"kind": "text", "paths": ["ftp://x/y"]}}),
        "data.source.paths",
        "file://, s3:// or hf://",
    ),
    (changed(checkpoint={"url": "gopher://x"}), "checkpoint.url", "file:// or s3://"),
    (changed(resources={"gpus_per_worker": 2}), "resources.gpus_per_worker", "0 or 1"),
    (changed(name="-"), "name", "pattern"),
]


@pytest.mark.parametrize(("job", "field", "message"), BAD, ids=[f"{field}: {message}" for _, field, message in BAD])
def test_a_bad_spec_names_the_field_and_the_remedy(job: dict, field: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(job)
    problems = {".".join(map(str, problem["loc"])): problem["msg"] for problem in caught.value.errors()}
    assert field in problems
    messages = [p["msg"] for p in caught.value.errors() if ".".join(map(str, p["loc"])) == field]
    assert any(message in text for text in messages), messages


def test_every_problem_is_listed_at_once() -> None:
    job = changed(parallelism={"tensor_parallel_size": 3, "pipeline_parallel_size": 32}, optimizer={"warmup_steps": 99})
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(job)
    sections = {problem["loc"][0] for problem in caught.value.errors()}
    assert sections == {"parallelism", "training", "optimizer"}


def test_a_spec_survives_json() -> None:
    spec = JobSpec.model_validate(GOOD)
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_number_with_an_exponent_is_a_number_in_yaml_too(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "{name: job, model: {preset: tiny, rope_theta: 1E+4}, training: {steps: 1},\n"
        "optimizer: {learning_rate: 3e-4, epsilon: 1.e-8}}"
    )
    spec = load_job(path)
    assert (spec.model.rope_theta, spec.optimizer.learning_rate, spec.optimizer.epsilon) == (1e4, 3e-4, 1e-8)


def test_the_example_job_is_legal() -> None:
    assert load_job("examples/cola-tiny.yaml").parallelism.tensor_parallel_size == 2


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_example_is_a_legal_job(path: Path) -> None:
    assert load_job(path).name == path.stem


def test_a_job_file_may_name_the_validation_fraction_as_it_was_called_first() -> None:
    assert DataConfig.model_validate({"held_out_fraction": 0.2}) == DataConfig(validation_fraction=0.2)
    with pytest.raises(ValidationError, match="held_out_fraction"):
        DataConfig.model_validate({"held_out_fraction": 0.2, "validation_fraction": 0.2})


def test_records_name_preemption_as_it_was_called_first() -> None:
    assert Cause("ROOM_NEEDED") is Cause.PREEMPTED
    assert TypeAdapter(dict[Cause, int]).validate_json('{"ROOM_NEEDED": 2}') == {Cause.PREEMPTED: 2}
