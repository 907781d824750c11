"""What BOOST's 26 published example configurations say, as facts; and configurations that say it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Example:
    """One of them.

    Attributes:
        name: The file, without its common parts.
        marker: The field that names the class of its model.
        sizes: Hidden, intermediate, layers, heads, key-value heads, vocabulary.
        epsilon: Of its norms.
        tied: Whether the embedding is the head.
        extra: Further fields of its model.
        layout: dp, pp, tp.
        tokens: Steps, sequence length, micro-batch, accumulated micro-batches.
        validation: Interval and batches.
        schedule: Learning rate, warm-up, decay steps, lowest rate.
        decay_and_clip: Weight decay and the largest norm of a gradient.
        accumulate_in_fp32: Whether gradients are accumulated in fp32.
        flat: Whether Adam's fields stand where nanotron's earlier versions have them.
        data: Kind of the first stage's data: of the hub, token ids on disk, a nanoset, or random.
        stages: Where the stages of data start.
    """

    name: str
    marker: str
    sizes: tuple[int | None, ...]
    epsilon: float
    tied: bool
    extra: dict[str, Any]
    layout: tuple[int, int, int]
    tokens: tuple[int, int, int, int]
    validation: tuple[int, int]
    schedule: tuple[float, int, int | None, float]
    decay_and_clip: tuple[float, float]
    accumulate_in_fp32: bool
    flat: bool
    data: str
    stages: tuple[int, ...]


# fmt: off
EXAMPLES = {example.name: example for example in (
    Example("cola/cola_llama", "is_cola_llama_config", (16, 64, 2, 4, 4, 256), 1e-05, True, {"rank": 4}, (1, 1, 1),
        (8, 256, 2, 1), (-1, 0), (0.0003, 2, 13, 1e-05), (0.01, 1.0), True, False, "hub", (1, 10)),
    Example("cola/cola_llama_1b", "is_cola_llama_config", (2048, 5472, 24, 32, 32, 32000), 1e-06, True,
        {"attn_rank": 512, "mlp_rank": 512, "rmsnorm_type": "sync"}, (1, 1, 4), (10, 4096, 2, 16), (600, 1000), (0.001,
        1200, None, 1e-05), (0.01, 0.5), True, False, "disk", (1,)),
    Example("cola/cola_llama_2l_h256_seq_4096", "is_cola_llama_config", (256, 768, 2, 8, 8, 32000), 1e-06, False,
        {"attn_rank": 64, "mlp_rank": 64, "rmsnorm_type": "sync"}, (2, 1, 1), (11000, 4096, 256, 1), (100, 2000),
        (0.006, 2200, None, 1e-05), (0.01, 0.5), False, False, "disk", (1,)),
    Example("cola/cola_llama_60m", "is_cola_llama_config", (512, 1344, 8, 8, 8, 32000), 1e-06, False, {"attn_rank":
        128, "mlp_rank": 128, "rmsnorm_type": "sync"}, (1, 1, 4), (916, 4096, 32, 6), (100, 1200), (0.004, 180, None,
        1e-05), (0.01, 0.5), False, False, "disk", (1,)),
    Example("cola/cola_llama_7b", "is_cola_llama_config", (4096, 11008, 32, 32, 32, 32000), 1e-06, True,
        {"attn_rank": 1024, "mlp_rank": 1024}, (1, 1, 4), (9, 4096, 1, 4), (10, 1000), (0.0003, 2, 13, 1e-05), (0.01,
        1.0), True, False, "hub", (1,)),
    Example("cola/tiny_cola_llama", "is_cola_llama_config", (64, 64, 2, 4, 4, 256), 1e-06, True, {"attn_rank": 16,
        "mlp_rank": 16, "rmsnorm_type": "sync"}, (2, 1, 2), (9, 256, 2, 1), (-1, 0), (0.0003, 2, 13, 1e-05), (0.01,
        0.5), True, False, "hub", (1,)),
    Example("llama_1b", "is_llama_config", (2048, 5472, 24, 32, 32, 32000), 1e-06, True, {}, (1, 1, 4), (10, 4096,
        4, 1), (600, 0), (0.001, 1200, None, 1e-05), (0.01, 0.5), False, False, "disk", (1,)),
    Example("llama_1b_large", "is_llama_config", (2048, 5472, 24, 32, 32, 32000), 1e-06, True, {}, (512, 1, 1),
        (24000, 4096, 2, 1), (-1, 0), (0.0005, 4800, None, 1e-05), (0.1, 1.0), False, False, "hub", (1,)),
    Example("llama_60m", "is_llama_config", (512, 1344, 8, 8, 8, 32000), 1e-06, False, {}, (2, 1, 1), (916, 4096,
        32, 6), (100, 1200), (0.004, 180, None, 1e-05), (0.01, 0.5), False, False, "disk", (1,)),
    Example("llama_7b", "is_llama_config", (4096, 11008, 32, 32, 32, 32000), 1e-06, True, {}, (1, 1, 4), (9, 4096,
        1, 4), (-1, 0), (0.0003, 2, 13, 1e-05), (0.01, 1.0), False, False, "hub", (1,)),
    Example("nanoset", "is_llama_config", (16, 64, 2, 4, 4, 50257), 1e-05, True, {}, (1, 1, 1), (200, 1024, 2, 1),
        (-1, 0), (0.0003, 2, 98, 1e-05), (0.01, 1.0), True, False, "nanoset", (1, 15, 25)),
    Example("tiny_llama", "is_llama_config", (64, 256, 2, 4, 4, 256), 1e-05, True, {}, (2, 1, 2), (9, 256, 2, 1),
        (-1, 0), (0.0003, 2, 13, 1e-05), (0.01, 1.0), True, False, "hub", (1, 10)),
    Example("tiny_llama_with_s3_upload", "is_llama_config", (16, 64, 2, 4, 4, 256), 1e-05, True, {}, (1, 1, 1), (30,
        256, 2, 1), (-1, 0), (0.0003, 2, 13, 1e-05), (0.01, 1.0), True, False, "hub", (1, 10)),
    Example("contributor-guide/debug_tiny_llama", "is_llama_config", (16, 64, 2, 4, 4, 50277), 1e-05, True, {}, (1,
        1, 2), (10, 32, 2, 1), (-1, 0), (0.0003, 2, 8, 1e-05), (0.01, 1.0), True, True, "hub", (1, 10)),
    Example("custom-dataloader/custom_dl", "is_llama_config", (16, 64, 2, 4, 4, 256), 1e-05, True, {}, (2, 1, 1),
        (15, 256, 2, 1), (-1, 0), (0.0003, 2, 13, 1e-05), (0.01, 1.0), True, False, "random", (1, 10)),
    Example("doremi/2.8b_llama", "is_llama_config", (4096, 24576, 6, 32, 16, 49152), 1e-05, True, {}, (8, 1, 2),
        (70000, 1024, 64, 1), (2, 1), (0.0003, 2, 8, 1e-05), (0.01, 1.0), True, True, "hub", (1,)),
    Example("doremi/2.8b_llama_with_tuned_weights", "is_llama_config", (4096, 24576, 6, 32, 16, 49152), 1e-05, True,
        {}, (1, 1, 8), (70010, 1024, 64, 1), (-1, 1), (0.0003, 2, 8, 1e-05), (0.01, 1.0), True, True, "hub", (1,)),
    Example("doremi/280m_llama", "is_llama_config", (1024, 4096, 10, 8, 4, 49152), 1e-05, True, {}, (2, 1, 2), (10,
        1024, 32, 1), (-1, 0), (0.0003, 2, 8, 1e-05), (0.01, 1.0), True, True, "hub", (1,)),
    Example("doremi/280m_llama_proxy", "is_llama_config", (1024, 4096, 10, 8, 4, 49152), 1e-05, True, {}, (2, 1, 2),
        (10, 1024, 32, 1), (-1, 0), (0.0003, 2, 8, 1e-05), (0.01, 1.0), True, True, "hub", (1,)),
    Example("mamba/mamba", "is_mamba_config", (None, None, 48, None, None, 50277), 1e-05, False, {"d_model": 1536},
        (2, 2, 2), (100, 2048, 2, 1), (-1, 0), (0.0003, 10, 90, 1e-05), (0.01, 1.0), True, True, "hub", (1,)),
    Example("moe/llamoe", "is_llamoe_config", (512, 2048, 1, 8, 8, 32000), 1e-06, False, {"moe_num_experts": 4,
        "num_experts_per_tok": 1}, (1, 1, 2), (1918, 256, 256, 2), (-1, 0), (0.0003, 100, 1818, 1e-05), (0.01, 1.0),
        False, False, "hub", (1, 10)),
    Example("mup/mup_350m_llama", "is_llama_config", (1024, 4096, 14, 8, 4, 49152), 1e-05, False, {"use_mup":
        True}, (4, 1, 2), (440, 1024, 32, 8), (-1, 0), (0.001, 100, None, 1e-05), (0.1, 1.0), False, True, "hub", (1,
        9000)),
    Example("mup/sp_350m_llama", "is_llama_config", (1024, 4096, 14, 8, 4, 49152), 1e-05, False, {}, (4, 1,
        2), (440, 1024, 32, 8), (-1, 0), (0.001, 100, None, 1e-05), (0.1, 1.0), False, True, "hub", (1, 9000)),
    Example("tensor/tt_llama_1b", "is_tt_llama_config", (2048, 5472, 24, 32, 32, 32000), 1e-06, True, {"tt_rank":
        512, "tt_cores": 6}, (256, 1, 1), (6000, 4096, 2, 16), (600, 1000), (0.001, 1200, None, 1e-05), (0.01, 0.5),
        True, False, "disk", (1,)),
    Example("tensor/tt_llama_60m", "is_tt_llama_config", (512, 1344, 8, 8, 8, 32000), 1e-06, False, {"tt_rank": 128,
        "tt_cores": 6}, (2, 1, 1), (916, 4096, 32, 6), (100, 1200), (0.004, 180, None, 1e-05), (0.01, 0.5), False,
        False, "disk", (1,)),
    Example("tensor/tt_llama_60m_seq_256", "is_tt_llama_config", (512, 1344, 8, 8, 8, 32000), 1e-06, False,
        {"tt_rank": 128, "tt_cores": 6}, (2, 1, 1), (11000, 256, 256, 1), (2200, 2000), (0.006, 2200, None, 1e-05),
        (0.01, 0.5), False, False, "hub", (1,)),
)}
# fmt: on

_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
_DATASETS: dict[str, Any] = {
    "hub": {"hf_dataset_or_datasets": "wikitext", "hf_dataset_splits": "train", "text_column_name": "text"},
    "disk": {"hf_dataset_or_datasets": "/data/seq_len_4096", "text_column_name": "text", "load_from_disk": True},
    "nanoset": {"dataset_folder": "datasets/c4-es/tokenized"},
    "random": None,
}


def configuration(example: Example) -> dict[str, Any]:
    """A configuration with these facts, laid out as nanotron does it."""
    extra = dict(example.extra)
    mup = extra.pop("use_mup", False)
    rate, warmup, decay, lowest = example.schedule
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True}
    return {
        "checkpoints": {
            "checkpoint_interval": 20, "checkpoints_path": "checkpoints", "resume_checkpoint_path": None,
            "save_initial_state": False, "checkpoints_path_is_shared_file_system": False,
        },
        "data_stages": [
            {
                "data": {"dataset": _DATASETS[example.data], "num_loading_workers": 1, "seed": 42},
                "name": f"Stage {number}", "start_training_step": start,
            }
            for number, start in enumerate(example.stages)
        ],
        "general": {"project": "debug", "run": f"{example.name}_%date_%jobid", "seed": 42, "step": None},
        "lighteval": None,
        "logging": {"log_level": "info"},
        "model": {
            "ddp_bucket_cap_mb": 25, "dtype": "bfloat16", "make_vocab_size_divisible_by": 1,
            "init_method": {"use_mup": True} if mup else {"std": 0.025},
            "model_config": {
                example.marker: True, **dict(zip(_SIZES, example.sizes, strict=True)), "hidden_act": "silu",
                "rms_norm_eps": example.epsilon, "tie_word_embeddings": example.tied, "bos_token_id": 1,
                "eos_token_id": 2, "initializer_range": 0.02, "max_position_embeddings": example.tokens[1],
                "pad_token_id": None, "pretraining_tp": 1, "rope_scaling": None, "use_cache": True, **extra,
            },
        },
        "optimizer": {
            "accumulate_grad_in_fp32": example.accumulate_in_fp32, "weight_decay": example.decay_and_clip[0],
            "clip_grad": example.decay_and_clip[1], "zero_stage": 0,
            "learning_rate_scheduler": {
                "learning_rate": rate, "lr_decay_starting_step": None, "lr_decay_steps": decay, "min_decay_lr": lowest,
                "lr_decay_style": "cosine", "lr_warmup_steps": warmup, "lr_warmup_style": "linear",
            },
            **(adam if example.flat else {"optimizer_factory": {"name": "adamW", **adam}}),
        },
        "parallelism": {
            **dict(zip(("dp", "pp", "tp"), example.layout, strict=True)), "expert_parallel_size": 1,
            "pp_engine": "1f1b", "tp_mode": "ALL_REDUCE", "tp_linear_async_communication": False,
        },
        "profiler": None,
        "tokenizer": {"tokenizer_max_length": None, "tokenizer_name_or_path": "gpt2", "tokenizer_revision": None},
        "tokens": {
            "train_steps": example.tokens[0], "sequence_length": example.tokens[1],
            "micro_batch_size": example.tokens[2], "batch_accumulation_per_replica": example.tokens[3],
            "val_check_interval": example.validation[0], "limit_val_batches": example.validation[1],
            "limit_test_batches": 0,
        },
    }  # fmt: skip
