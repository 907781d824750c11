import pytest

from boost_core.architecture import block_exchanges, gate_matrices, model_flops_per_token, parameter_count
from boost_core.config import JobSpec, ModelConfig, ParallelismConfig
from boost_core.plan.throughput import embedding_work

BTP = ParallelismConfig()


def preset(name: str, **changes) -> ModelConfig:
    return ModelConfig.model_validate({"preset": name, "vocab_size": 32_000} | changes)


@pytest.mark.parametrize(
    ("name", "low_rank", "dense"),
    [("60m", 42.8, 58.1), ("130m", 94.0, 134.1), ("350m", 185.2, 368.0), ("1b", 609.3, 1339), ("7b", 2821, 6738)],
)
def test_parameters_are_those_of_the_cola_paper(name: str, low_rank: float, dense: float) -> None:
    for model, millions in ((preset(name), low_rank), (preset(name, family="dense"), dense)):
        assert parameter_count(model) / 1e6 == pytest.approx(millions, abs=0.5 if millions > 1000 else 0.05)


@pytest.mark.parametrize(("name", "billions"), [("3b", 3.4), ("13b", 13.0), ("30b", 30.0), ("40b", 39.5)])
def test_the_large_presets_have_the_size_of_their_name_when_dense(name: str, billions: float) -> None:
    assert parameter_count(preset(name, family="dense")) / 1e9 == pytest.approx(billions, rel=0.03)


def test_lax_adds_its_gates_and_norms_from_the_second_block_on() -> None:
    plain = parameter_count(preset("60m"))
    for gate, weights in (("identity", 0), ("dense", 128 * 128), ("tensor", 8 * 8 + 16 * 16)):
        crossed = parameter_count(preset("60m", family="lax", lax={"gate": gate}))
        assert crossed - plain == 7 * 7 * (weights + 2 * 128)
    assert parameter_count(preset("60m")) - parameter_count(preset("60m", tie_embeddings=True)) == 32_000 * 512
    for rank, sides in ((256, (16, 16)), (128, (8, 16)), (7, (1, 7))):
        tensor = preset("60m", family="lax", lax={"gate": "tensor"}, rank=rank)
        assert gate_matrices(tensor) == dict(zip(("gate_a", "gate_b"), sides, strict=True))


@pytest.mark.parametrize(("family", "strategy", "mebibytes"), [
    ("dense", "fullrank", 256), ("cola", "vanilla", 1328), ("cola", "btp", 224),
])  # fmt: skip
def test_a_7b_block_sends_what_the_paper_says(family: str, strategy: str, mebibytes: int) -> None:
    """Table of the BOOST paper: micro-batch 4, sequence 4096, bf16."""
    parallelism = ParallelismConfig.model_validate({"strategy": strategy})
    sent = block_exchanges(preset("7b", family=family), parallelism).forward
    # A reduce-scatter, and an all-gather, is half of an all-reduce.
    elements = sum(payload.elements / (1 if payload.kind == "all_reduce" else 2) for payload in sent)
    assert elements * 4 * 4096 * 2 == mebibytes * 2**20


def test_only_the_fused_norm_needs_no_collective_of_its_own() -> None:
    model = preset("7b")
    calls = {
        norm: (len(block_exchanges(model, choice).forward), len(block_exchanges(model, choice).backward))
        for norm in ("fused", "online_paper", "sync")
        for choice in [ParallelismConfig.model_validate({"norm": norm})]
    }
    assert calls == {"fused": (4, 4), "online_paper": (6, 4), "sync": (6, 6)}


def test_an_embedding_moves_its_tables_gradient_for_any_number_of_tokens() -> None:
    def moved(sequences: int) -> float:
        training = {"steps": 1, "sequence_length": 1024, "micro_batch_size": sequences, "global_batch_size": 4}
        model = {"preset": "60m", "family": "cola", "vocab_size": 32_000}
        spec = {"name": "ends", "model": model, "training": training | {"precision": "bf16"}}
        return embedding_work(JobSpec.model_validate(spec)).moved_bytes

    table = 32_000 * 512
    # Written and read in bf16, and added to a sum in fp32, which is read and written.
    assert 2 * moved(2) - moved(4) == 12 * table


def test_model_flops_count_matrices_six_times_and_attention_in_full() -> None:
    model = ModelConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, rank=2, vocab_size=256
    )
    matrices = 2 * (4 * (8 + 8) + 3 * (8 + 16)) + 256 * 8
    assert model_flops_per_token(model, 10) == 6 * matrices + 12 * 8 * 10
    windowed = model.model_copy(update={"sliding_window": 3})
    assert model_flops_per_token(windowed, 10) == 6 * matrices + 12 * 8 * 3
    assert model_flops_per_token(windowed, 2) == model_flops_per_token(model, 2)
