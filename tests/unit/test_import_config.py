"""Configurations of nanotron and of BOOST's fork become jobs, and what is lost on the way is said."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from boost_core.config import JobSpec, load_job
from boost_core.config.nanotron import import_config
from service.cli.main import app

# The fields of BOOST's configuration of a 7B CoLA (arXiv 2512.12131's code).
COLA_7B: dict[str, Any] = {
    "checkpoints": {"checkpoint_interval": 20, "checkpoints_path": "checkpoints", "resume_checkpoint_path": None},
    "data_stages": [
        {
            "data": {
                "dataset": {
                    "hf_dataset_or_datasets": "wikitext", "hf_dataset_config_name": "wikitext-2-raw-v1",
                    "hf_dataset_splits": "train", "text_column_name": "text", "load_from_disk": False,
                },
                "num_loading_workers": 1, "seed": 42,
            },
            "name": "Stable Training Stage", "start_training_step": 1,
        }
    ],
    "general": {"project": "debug", "run": "cola_llama_7b_%date_%jobid", "seed": 42, "step": None},
    "logging": {"log_level": "info"},
    "model": {
        "ddp_bucket_cap_mb": 25, "dtype": "bfloat16", "init_method": {"std": 0.025}, "make_vocab_size_divisible_by": 1,
        "model_config": {
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "is_cola_llama_config": True,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "attn_rank": 1024,
            "mlp_rank": 1024, "rmsnorm_type": "sync", "rms_norm_eps": 1e-6, "rope_scaling": None,
            "tie_word_embeddings": True, "vocab_size": 32000,
        },
    },
    "optimizer": {
        "accumulate_grad_in_fp32": True, "clip_grad": 1.0, "weight_decay": 0.01, "zero_stage": 0,
        "learning_rate_scheduler": {
            "learning_rate": 0.0003, "lr_decay_starting_step": None, "lr_decay_steps": 13, "lr_decay_style": "cosine",
            "lr_warmup_steps": 2, "lr_warmup_style": "linear", "min_decay_lr": 0.00003,
        },
        "optimizer_factory": {
            "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "name": "adamW", "torch_adam_is_fused": True,
        },
    },
    "parallelism": {
        "dp": 2, "expert_parallel_size": 1, "pp": 1, "pp_engine": "1f1b", "tp": 4, "tp_mode": "ALL_REDUCE",
        "tp_linear_async_communication": False, "recompute_layer": True,
    },
    "tokenizer": {"tokenizer_name_or_path": "robot-test/dummy-tokenizer-wordlevel"},
    "tokens": {
        "batch_accumulation_per_replica": 4, "limit_val_batches": 10, "micro_batch_size": 4, "sequence_length": 4096,
        "train_steps": 9, "val_check_interval": 3,
    },
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    """The configuration with values changed by their dotted path; ``...`` removes one."""
    content = copy.deepcopy(COLA_7B)
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


def test_what_means_the_same_is_carried_over(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(import_config(written(tmp_path)).job)
    model, parallelism, training, optimizer = spec.model, spec.parallelism, spec.training, spec.optimizer
    assert spec.name == "cola_llama_7b"
    assert (model.family, model.rank, model.hidden_size, model.intermediate_size) == ("cola", 1024, 4096, 11008)
    assert (model.num_hidden_layers, model.key_value_heads, model.vocab_size) == (32, 32, 32_000)
    assert (model.tie_embeddings, model.norm_epsilon) == (True, 1e-6)
    assert (parallelism.tensor_parallel_size, parallelism.data_parallel_size, parallelism.recompute) == (4, 2, "full")
    assert (training.steps, training.sequence_length, training.global_batch_size) == (9, 4096, 4 * 4 * 2)
    assert (training.precision, training.seed, training.evaluate_every_steps) == ("bf16", 42, 3)
    assert (training.evaluate_sequences, spec.checkpoint.every_steps, spec.checkpoint.url) == (40, 20, "checkpoints")
    assert (optimizer.learning_rate, optimizer.betas, optimizer.clip_norm) == (0.0003, (0.9, 0.95), 1.0)
    assert (optimizer.warmup_steps, optimizer.final_learning_rate_ratio) == (2, pytest.approx(0.1))


def test_what_is_lost_is_said_and_nothing_else(tmp_path: Path) -> None:
    notes = import_config(written(tmp_path)).notes
    assert [note.partition(":")[0] for note in notes] == [
        "model.model_config.rmsnorm_type=sync",
        "model.init_method.std=0.025",
        "parallelism.recompute_layer=True",
        "data_stages.0.data.dataset.hf_dataset_or_datasets=wikitext wikitext-2-raw-v1 train",
        "tokenizer.tokenizer_name_or_path=robot-test/dummy-tokenizer-wordlevel",
        "optimizer.learning_rate_scheduler.lr_decay_steps=13",
    ]


def test_a_dense_model_of_nanotrons_own(tmp_path: Path) -> None:
    at = "model__model_config__"
    config = written(tmp_path, **{f"{at}attn_rank": ..., f"{at}mlp_rank": ..., f"{at}rmsnorm_type": ...})
    spec = JobSpec.model_validate(import_config(config).job)
    assert (spec.model.family, spec.model.rank) == ("dense", None)


@pytest.mark.parametrize(
    ("path", "value", "note"),
    [
        ("model__model_config__mlp_rank", 512, "mlp_rank=512: all bottlenecks have one rank here, 1024"),
        ("model__model_config__rope_interleaved", True, "rope_interleaved=True: rotary"),
        ("model__model_config__rope_scaling", {"factor": 8}, "rope_scaling.factor=8: not carried over"),
        ("model__model_config__hidden_act", "gelu", "hidden_act=gelu"),
        ("model__dtype", "float16", "dtype=float16: bf16 is used"),
        ("parallelism__pp_engine", "afab", "pp_engine=afab"),
        ("parallelism__context_parallel_size", 2, "parallelism.context_parallel_size=2: not carried over"),
        ("optimizer__zero_stage", 3, "zero_stage=3: stage 2"),
        ("optimizer__learning_rate_scheduler__lr_decay_style", "linear", "lr_decay_style=linear: it is cosine here"),
        ("optimizer__optimizer_factory__name", "sgd", "name=sgd"),
        ("checkpoints__resume_checkpoint_path", "/old", "resume_checkpoint_path=/old"),
    ],
)
def test_each_thing_that_is_lost_has_its_note(tmp_path: Path, path: str, value: Any, note: str) -> None:
    imported = import_config(written(tmp_path, **{path: value}))
    assert any(note in each for each in imported.notes)
    JobSpec.model_validate(imported.job)


def test_data_that_is_on_disk_is_carried_over(tmp_path: Path) -> None:
    at = "data_stages__0__data__dataset__"
    changes = {f"{at}load_from_disk": True, f"{at}hf_dataset_or_datasets": "/data/c4", f"{at}text_column_name": "words"}
    imported = import_config(written(tmp_path, **changes, tokenizer__tokenizer_name_or_path="/t/tokenizer.json"))
    spec = JobSpec.model_validate(imported.job)
    assert [(source.kind, source.paths, source.text_field) for source, _ in spec.data.sources] == [
        ("dataset", ("/data/c4",), "words")
    ]
    assert spec.data.tokenizer == "/t/tokenizer.json"


def test_the_command_writes_a_job_that_loads(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import-config", str(written(tmp_path)), "--out", str(tmp_path / "job.yaml")])
    assert result.exit_code == 0
    assert "not carried over as it was: model.init_method.std=0.025" in result.stderr
    assert load_job(tmp_path / "job.yaml").name == "cola_llama_7b"


@pytest.mark.parametrize(("content", "message"), [("a: b", "is no configuration"), ("a: [", "is not YAML")])
def test_what_is_no_configuration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    result = CliRunner().invoke(app, ["import-config", str(tmp_path / "config.yaml")])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_layout_that_is_not_legal_here_is_said(tmp_path: Path) -> None:
    config = written(tmp_path, parallelism__tp=3)
    result = CliRunner().invoke(app, ["import-config", str(config)])
    assert result.exit_code == 2
    assert "parallelism.tensor_parallel_size" in result.stderr
