"""Configurations of nanotron and of BOOST's fork become jobs of the same function, or are refused by name."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from boost_core.config import Activation, JobSpec, load_job
from boost_core.config.nanotron import Imported, import_config
from boost_core.optim.schedule import learning_rate
from service.cli.commands.local import import_configuration
from service.cli.console import BadInput
from service.cli.main import app
from tests.unit.boost_examples import EXAMPLES, Example, configuration

COLA_7B = replace(EXAMPLES["cola/cola_llama_7b"], schedule=(3e-4, 2, 7, 3e-5))
LLAMA = EXAMPLES["llama_7b"]
REFUSED = {
    "mamba/mamba": "is_mamba_config",
    "moe/llamoe": "is_llamoe_config",
    "mup/mup_350m_llama": "init_method.use_mup",
    "tensor/tt_llama_1b": "is_tt_llama_config",
    "tensor/tt_llama_60m": "is_tt_llama_config",
    "tensor/tt_llama_60m_seq_256": "is_tt_llama_config",
}


def written(folder: Path, example: Example = COLA_7B, **changes: Any) -> Path:
    """A configuration with values changed by their path, ``__`` between its parts; ``...`` removes one."""
    content = configuration(example)
    for path, value in changes.items():
        *sections, last = path.split("__")
        place: Any = content
        for section in sections:
            place = place[int(section) if section.isdigit() else section]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def spec_of(imported: Imported) -> JobSpec:
    """The job once its data is set, which must be before it validates."""
    with pytest.raises(ValidationError) as refused:
        JobSpec.model_validate(imported.job)
    assert {".".join(map(str, error["loc"])) for error in refused.value.errors()} == imported.unset.keys()
    return JobSpec.model_validate(imported.job | {"data": {"source": {"kind": "tokenized", "paths": ["/data"]}}})


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in REFUSED])
def test_each_published_example_becomes_a_job_of_the_same_model_and_trajectory(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    spec = spec_of(import_config(written(tmp_path, example)))
    model, layout, training, optimizer = spec.model, spec.parallelism, spec.training, spec.optimizer
    family = {"is_llama_config": "dense", "is_cola_llama_config": "cola"}[example.marker]
    assert (model.family, model.rank) == (family, example.extra.get("rank", example.extra.get("attn_rank")))
    assert not (family == "cola" and model.mlp_activation is not Activation.LINEAR)
    *sizes, vocabulary = example.sizes
    assert [
        model.hidden_size, model.intermediate_size, model.num_hidden_layers, model.num_attention_heads,
        model.key_value_heads,
    ] == sizes  # fmt: skip
    assert (model.norm_epsilon, model.tie_embeddings, model.rope_theta) == (example.epsilon, example.tied, 10_000)
    replicas, _, tensor = example.layout
    assert model.vocab_size == next(size for size in range(vocabulary, vocabulary + tensor) if size % tensor == 0)
    assert (layout.data_parallel_size, layout.pipeline_parallel_size, layout.tensor_parallel_size) == example.layout
    steps, length, micro_batch, accumulated = example.tokens
    assert (training.steps, training.sequence_length, training.micro_batch_size) == (steps, length, micro_batch)
    assert training.global_batch_size == micro_batch * accumulated * replicas
    assert (training.precision, training.seed, layout.zero_stage, layout.recompute) == ("bf16", 42, 0, "none")
    assert (optimizer.betas, optimizer.adam_epsilon) == ((0.9, 0.95), 1e-8)
    assert (optimizer.weight_decay, optimizer.clip_norm) == example.decay_and_clip


@pytest.mark.parametrize("name", REFUSED)
def test_each_published_example_of_a_model_that_is_not_here_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name]):
        import_config(written(tmp_path, EXAMPLES[name]))


def test_the_same_in_detail(tmp_path: Path) -> None:
    changes = {"parallelism__recompute_layer": True, "parallelism__dp": 2, "tokens__val_check_interval": 3}
    imported = import_config(written(tmp_path, **changes))
    spec = spec_of(imported)
    assert (spec.name, spec.model.rank, spec.parallelism.recompute) == ("cola-cola_llama_7b", 1024, "full")
    assert (spec.training.evaluate_every_steps, spec.training.evaluate_sequences) == (3, 1000 * 1 * 2)
    assert (spec.checkpoint.every_steps, spec.checkpoint.url) == (20, "checkpoints")
    assert (spec.optimizer.warmup_steps, spec.optimizer.final_learning_rate_ratio) == (2, pytest.approx(0.1))
    assert [note.partition(":")[0] for note in imported.notes] == [
        "model.model_config.rmsnorm_type=triton",
        "model.init_method.std=0.025",
        "parallelism.recompute_layer=True",
        "optimizer.weight_decay=0.01",
        "optimizer.learning_rate_scheduler.lr_warmup_steps=2",
    ]


@pytest.mark.parametrize(
    ("fields", "rank"), [({}, 1024), ({"attn_rank": 1024}, 1024), ({"rank": 64}, 64), ({"mlp_rank": 1024}, 1024)]
)
def test_ranks_have_the_defaults_of_boosts_class(tmp_path: Path, fields: dict[str, int], rank: int) -> None:
    spec = spec_of(import_config(written(tmp_path, replace(COLA_7B, extra=fields))))
    assert (spec.model.family, spec.model.rank) == ("cola", rank)


def test_a_silu_on_the_gate_beside_the_latents_is_kept(tmp_path: Path) -> None:
    spec = spec_of(import_config(written(tmp_path, replace(COLA_7B, extra=COLA_7B.extra | {"both_act": True}))))
    assert (spec.model.bottleneck_activation, spec.model.mlp_activation) == (Activation.SILU, Activation.SILU)


@pytest.mark.parametrize(
    ("extra", "layout", "noted"),
    [
        ({}, (2, 1, 2), True),
        ({"rmsnorm_type": "triton"}, (1, 1, 4), True),
        ({"rmsnorm_type": "triton"}, (4, 1, 1), False),
        ({"rmsnorm_type": "sync"}, (1, 1, 4), False),
        ({"rmsnorm_type": "online"}, (1, 1, 4), False),
    ],
)
def test_a_norm_over_each_ranks_shard_is_another_function(
    tmp_path: Path, extra: dict[str, str], layout: tuple[int, int, int], noted: bool
) -> None:
    notes = import_config(written(tmp_path, replace(COLA_7B, extra=extra, layout=layout))).notes
    assert any("rmsnorm_type=triton" in note and "another function" in note for note in notes) == noted


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model__model_config__mlp_rank", 512, "mlp_rank=512: attention has 1024"),
        ("model__model_config__rank", 4, "model_config.rank=4: attention has 1024"),
        ("model__model_config__attn_rank", 1.5, "attn_rank=1.5 is not a whole number"),
        ("model__model_config__rope_scaling", {"factor": 8}, "rope_scaling.factor=8: not supported here"),
        ("model__model_config__hidden_act", "gelu", "hidden_act=gelu: it is silu here"),
        ("model__model_config__attention_bias", True, "attention_bias=True: it is false here"),
        ("model__model_config__tie_word_embeddings", "no", "tie_word_embeddings=no is neither true nor false"),
        ("model__model_config__rmsnorm_type", "layer", "rmsnorm_type=layer: no such norm"),
        (
            "model__model_config__sliding_window_size",
            128,
            "sliding_window_size=128: not supported here, and may change",
        ),
        ("model__model_config__moe_config", {"num_experts": 8}, "moe_config.num_experts=8: not supported here"),
        (
            "model__model_config__is_qwen2_config",
            True,
            "is_qwen2_config: not supported here; use is_llama_config or is_cola_llama_config",
        ),
        ("model__model_config__is_llama_config", True, "is_cola_llama_config: not supported here"),
        ("model__model_config__hidden_size", "4k", "hidden_size=4k is not a whole number"),
        ("model__init_method", {"path": "/llama"}, "init_method.path=/llama: leave it out; convert"),
        ("optimizer__optimizer_factory__name", "sgd", "name=sgd: of these only adamW"),
        ("optimizer__weight_decay", True, "weight_decay=True is not a finite number"),
        ("optimizer__learning_rate_scheduler__learning_rate", 0, "learning_rate=0 and min_decay_lr=3e-05 are not"),
        ("tokens__micro_batch_size", "2", "micro_batch_size=2 is not a whole number"),
        ("parallelism__tp", 0, "parallelism.tp=0 is not a whole number from 1"),
        ("tokens__train_steps", ..., "tokens.train_steps is missing"),
        ("optimizer__learning_rate_scheduler__lr_warmup_steps", 10**400, "lr_warmup_steps=1000000000"),
        ("optimizer__learning_rate_scheduler__min_decay_lr", 10**400, "000… is not a finite number"),
        ("optimizer__optimizer_factory__name", "\x1b[2J", r"name=\x1b[2J: of these"),
    ],
)
def test_what_would_be_another_model_or_optimizer_is_refused(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=r"model|optimizer|tokens|parallelism") as refused:
        import_config(written(tmp_path, **{path: value}))
    assert message in str(refused.value)


@pytest.mark.parametrize(("example", "note"), [(COLA_7B, "the embedding and the head"), (LLAMA, "all weights")])
def test_what_the_first_weights_are_is_said(tmp_path: Path, example: Example, note: str) -> None:
    assert any(
        f"std=0.025: {note} start with a standard" in each for each in import_config(written(tmp_path, example)).notes
    )


ODD: list[Any] = [[1, [2]], {"a": {1: 2}}, "x", -1, 10**400, float("nan")]


def paths_in(content: Any, path: str = "") -> Iterator[str]:
    if path:
        yield path.removeprefix("__")
    for key, value in content.items() if isinstance(content, dict) else ():
        yield from paths_in(value, f"{path}__{key}")


@pytest.mark.full
@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:10])
def test_whatever_stands_anywhere_is_read_or_refused(tmp_path: Path, value: Any) -> None:
    paths = list(paths_in(configuration(COLA_7B)))
    assert len(paths) > 60
    for path in paths:
        with suppress(BadInput):
            import_configuration(written(tmp_path, **{path: value}))


def test_what_makes_a_dense_model_low_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cola_rank=64"):
        import_config(written(tmp_path, LLAMA, model__model_config__cola_rank=64))
    assert spec_of(import_config(written(tmp_path, LLAMA, model__model_config__cola_rank=None))).model.rank is None


@pytest.mark.parametrize("example", [COLA_7B, LLAMA], ids=["cola", "dense"])
def test_a_model_without_its_marker_is_known_by_its_ranks(tmp_path: Path, example: Example) -> None:
    marked = import_config(written(tmp_path, example)).job["model"]
    unmarked = written(tmp_path, example, **{f"model__model_config__{example.marker}": ...})
    assert import_config(unmarked).job["model"] == marked


def test_all_that_is_refused_is_said_at_once(tmp_path: Path) -> None:
    at = "model__model_config__"
    config = written(tmp_path, **{f"{at}hidden_act": "gelu", f"{at}z_loss_enabled": True, f"{at}no_rope_layer": 4})
    result = CliRunner().invoke(app, ["import-config", str(config)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert [line.partition("=")[0] for line in result.stderr.splitlines()] == [
        f"error: model.model_config.{field}" for field in ("hidden_act", "z_loss_enabled", "no_rope_layer")
    ]


@pytest.mark.parametrize(
    ("path", "value", "note"),
    [
        ("model__model_config__rope_interleaved", True, "rope_interleaved=True: rotary"),
        ("model__dtype", "float16", "dtype=float16: bf16 is used"),
        ("model__make_vocab_size_divisible_by", 128, "vocab_size=32000: model.vocab_size=32256"),
        ("parallelism__expert_parallel_size", 2, "parallelism.expert_parallel_size=2: not supported"),
        ("optimizer__accumulate_grad_in_fp32", False, "accumulate_grad_in_fp32=False: master weights"),
        ("optimizer__weight_decay_exclude_named_params", [".*bias"], "params.0=.*bias: not carried over"),
        ("optimizer__zero_stage", 3, "zero_stage=3: stage 2"),
        ("optimizer__learning_rate_scheduler__lr_decay_style", "1-sqrt", "lr_decay_style=1-sqrt: it is cosine here"),
        (
            "optimizer__learning_rate_scheduler__lr_warmup_style",
            "constant",
            "lr_warmup_style=constant: it is linear here",
        ),
        ("optimizer__learning_rate_scheduler__lr_decay_steps", 13, "there it is 13 steps from step 2"),
        ("optimizer__learning_rate_scheduler__lr_decay_starting_step", 4, "there it is 7 steps from step 4"),
        ("optimizer__learning_rate_scheduler__lr_warmup_steps", 90, "the run ends within it, at learning_rate=3e-05"),
        ("checkpoints__resume_checkpoint_path", "/old", "resume_checkpoint_path=/old"),
        ("data_stages__0__data__seed", 7, "data_stages.0.data.seed=7: training.seed=42"),
        ("doremi", {"domain_names": "a, b"}, "doremi: this section is not carried over"),
    ],
)
def test_each_thing_that_is_lost_has_its_note(tmp_path: Path, path: str, value: Any, note: str) -> None:
    imported = import_config(written(tmp_path, **{path: value}))
    assert any(note in each for each in imported.notes)
    spec_of(imported)


def test_later_stages_of_data_that_are_reached_are_said_to_be_lost(tmp_path: Path) -> None:
    notes = import_config(written(tmp_path, replace(COLA_7B, stages=(1, 5, 10)))).notes
    assert [note.partition(":")[0] for note in notes if "stages" in note] == ["data_stages.1.start_training_step=5"]


@pytest.mark.parametrize(
    ("data", "source", "unset"),
    [
        ("hub", {"kind": "dataset", "paths": [], "text_field": "text"}, ["hf_dataset_or_datasets=wikitext", "=gpt2"]),
        ("disk", {"kind": "tokenized", "paths": []}, ["hf_dataset_or_datasets=/data/seq_len_4096, load_from_disk"]),
        ("nanoset", {"kind": "tokenized", "paths": []}, ["dataset_folder=datasets/c4-es/tokenized"]),
        ("random", {"kind": "tokenized", "paths": []}, ["data.dataset=None is random tokens"]),
    ],
)
def test_data_is_left_to_be_set_and_never_another(
    tmp_path: Path, data: str, source: dict[str, Any], unset: list[str]
) -> None:
    imported = import_config(written(tmp_path, replace(COLA_7B, data=data)))
    assert imported.job["data"]["source"] == source
    assert [part in said for part, said in zip(unset, imported.unset.values(), strict=True)] == [True] * len(unset)


@pytest.mark.parametrize("written_as", ["70_000", "+70000", "0x11170", "19:26:40"])
def test_numbers_are_read_as_nanotron_reads_them(tmp_path: Path, written_as: str) -> None:
    config = written(tmp_path, tokens__train_steps=70_000, optimizer__learning_rate_scheduler__lr_decay_steps=60_000)
    text = config.read_text()
    assert "train_steps: 70000\n" in text and yaml.safe_load(written_as) == 70_000
    config.write_text(text.replace("train_steps: 70000\n", f"train_steps: {written_as}\n"))
    assert spec_of(import_config(config)).training.steps == 70_000


def test_the_data_of_earlier_versions_is_named_too(tmp_path: Path) -> None:
    config = written(tmp_path, data_stages=..., data={"dataset": {"hf_dataset_or_datasets": "the_pile"}})
    assert "hf_dataset_or_datasets=the_pile" in import_config(config).unset["data.source.paths"]


def test_the_command_writes_a_job_that_loads_once_its_data_is_set(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    result = CliRunner().invoke(app, ["import-config", str(written(tmp_path)), "--out", str(job)])
    assert result.exit_code == 0
    assert "not converted exactly: model.init_method.std=0.025" in result.stderr
    assert "to be set before the job runs: data.source.paths: data_stages.0.data.dataset" in result.stderr
    with pytest.raises(ValidationError, match=r"needs at least one path"):
        load_job(job)
    finished = yaml.safe_load(job.read_text())
    finished["data"]["source"]["paths"], finished["data"]["tokenizer"] = ["/data"], "/data/tokenizer.json"
    job.write_text(yaml.safe_dump(finished))
    assert load_job(job).model.family == "cola"


ALIASES = "model: {}\ntokens: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{10 * f'*a{n - 1}, '}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: b", "is not a nanotron configuration"),
        (b"a: [", "config.yaml is not YAML"),
        (b"a: \xff", "config.yaml is not YAML"),
        (ALIASES.encode(), "has more than 100000 values"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    result = CliRunner().invoke(app, ["import-config", str(tmp_path / "config.yaml")])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_layout_that_is_not_legal_here_is_said(tmp_path: Path) -> None:
    config = written(tmp_path, parallelism__tp=3)
    result = CliRunner().invoke(app, ["import-config", str(config)])
    assert result.exit_code == 2
    assert "parallelism.tensor_parallel_size" in result.stderr


def nanotrons_rates(steps: int, **schedule: Any) -> list[float]:
    """The learning rate of each step by nanotron's own scheduler."""
    from boost_core.convert.nanotron import modules

    modules()
    from nanotron.config import LRSchedulerArgs
    from nanotron.helpers import lr_scheduler_builder

    class Optimizer(torch.optim.SGD):
        def get_base_optimizer(self) -> torch.optim.Optimizer:
            return self

    optimizer = Optimizer([torch.nn.Parameter(torch.zeros(1))], schedule["learning_rate"])
    scheduler = lr_scheduler_builder(optimizer, LRSchedulerArgs(**schedule), steps)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("style", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 2, 9, 90])
def test_learning_rates_are_those_of_nanotrons_own_scheduler(tmp_path: Path, warmup: int, style: str) -> None:
    pytest.importorskip("nanotron", reason="optional: pip install 'boost-service[nanotron]'", exc_type=ImportError)
    example = replace(COLA_7B, schedule=(3e-4, warmup, None, 3e-5))
    spec = spec_of(import_config(written(tmp_path, example, optimizer__learning_rate_scheduler__lr_decay_style=style)))
    schedule = configuration(example)["optimizer"]["learning_rate_scheduler"] | {"lr_decay_style": style}
    theirs = nanotrons_rates(9, **schedule | {"lr_decay_steps": max(9 - warmup, 0)})
    ours = [learning_rate(step, 9, spec.optimizer) for step in range(1, 10)]
    assert ours == pytest.approx(theirs[1:], rel=1e-12)


def test_a_linear_decay_in_the_last_steps_becomes_wsd(tmp_path: Path) -> None:
    example = replace(COLA_7B, schedule=(3e-4, 2, 3, 3e-5))
    changes = {"lr_decay_style": "linear", "lr_decay_starting_step": 6}
    paths = {f"optimizer__learning_rate_scheduler__{name}": value for name, value in changes.items()}
    imported = import_config(written(tmp_path, example, **paths))
    optimizer = spec_of(imported).optimizer
    assert (optimizer.schedule, optimizer.decay_steps, optimizer.warmup_steps) == ("wsd", 3, 2)
    assert not any("lr_decay" in note for note in imported.notes)


def test_what_nanotrons_own_classes_write_is_read(tmp_path: Path) -> None:
    pytest.importorskip("nanotron", reason="optional: pip install 'boost-service[nanotron]'", exc_type=ImportError)
    from boost_core.convert.nanotron import modules

    modules()
    from nanotron import config as theirs

    config = theirs.Config(
        general=theirs.GeneralArgs(project="p", run="theirs"),
        parallelism=theirs.ParallelismArgs(dp=2, pp=1, tp=4),
        model=theirs.ModelArgs(theirs.LlamaConfig(vocab_size=50257, tie_word_embeddings=True), theirs.RandomInit(0.02)),
        tokenizer=theirs.TokenizerArgs("gpt2"),
        tokens=theirs.TokensArgs(
            sequence_length=128, train_steps=10, micro_batch_size=2, batch_accumulation_per_replica=3
        ),
        optimizer=theirs.OptimizerArgs(
            zero_stage=1, weight_decay=0.1, clip_grad=None, accumulate_grad_in_fp32=True, adam_eps=1e-6,
            adam_beta1=0.8, adam_beta2=0.9, torch_adam_is_fused=True,
            learning_rate_scheduler=theirs.LRSchedulerArgs(1e-3, 2, "linear", "cosine", min_decay_lr=0),
        ),
    )  # fmt: skip
    config.save_as_yaml(str(tmp_path / "config.yaml"))
    imported = import_config(tmp_path / "config.yaml")
    spec = spec_of(imported)
    assert (spec.model.family, spec.model.hidden_size, spec.model.vocab_size) == ("dense", 4096, 50260)
    assert (spec.parallelism.tensor_parallel_size, spec.parallelism.zero_stage) == (4, 1)
    assert (spec.training.global_batch_size, spec.training.seed) == (12, 42)
    assert (spec.optimizer.betas, spec.optimizer.adam_epsilon, spec.optimizer.clip_norm) == ((0.8, 0.9), 1e-6, 1e9)
    assert spec.optimizer.final_learning_rate_ratio == 0
    assert len(imported.notes) == 4  # the vocabulary, the first weights, decay of norms, and the warm-up
    config.model.model_config = theirs.Starcoder2Config()
    config.save_as_yaml(str(tmp_path / "config.yaml"))
    with pytest.raises(ValueError, match="is_starcoder2_config"):
        import_config(tmp_path / "config.yaml")
