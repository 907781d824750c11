import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork, Work
from typer.testing import CliRunner

import boost_core.bench.__main__ as bench
import tests.benchmarks.kernels as kernels
import tests.benchmarks.rank as rank_benchmark
from boost_core.architecture import block_exchanges
from boost_core.bench.rank import LoneCommunicator, RunShape, alone, draw_weights
from boost_core.bench.results import NO_GPU, Row, table
from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.hardware import LINKS
from boost_core.parallel import communicator as communicator_module
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.plan.machine import MeasuredProfile
from boost_core.plan.throughput import collective_seconds
from boost_core.train import state as state_module
from boost_core.train import step_graph
from boost_core.train.state import TrainState
from boost_core.train.step import Requests, StepResult, training_step
from service.cli.main import app
from tests.benchmarks.rank import VARIANTS, rank_rows
from tests.gpu.published import PUBLISHED
from tests.jobs import tiny_job, write_corpus
from tests.numerics.recorded_graph import RecordedGraph
from tests.unit.test_profile import MEASURED

AT_A_TINY_SHAPE = ["--model", "tiny", "--tp", "2", "--micro-batch", "1", "--sequence", "16", "--repeats", "2"]
Figures = dict[str, dict[str, float]]


def figures(path: Path) -> Figures:
    """Median by case and quantity."""
    found: Figures = {}
    with path.open() as stream:
        for row in csv.DictReader(stream):
            assert "no GPU" in row["device"]
            assert row["commit"] and row["torch_version"] and row["triton_version"]
            assert float(row["p20"]) <= float(row["p50"]) <= float(row["p80"])
            found.setdefault(row["case"], {})[row["quantity"]] = float(row["p50"])
    return found


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    path = tmp_path_factory.mktemp("bench") / "results.csv"
    assert rank_benchmark.main([*AT_A_TINY_SHAPE, "--layers", "2", "--results", str(path)]) == 0
    return figures(path)


@pytest.mark.nightly
def test_a_ranks_step_falls_into_parts(rank: Figures) -> None:
    assert [case.partition(": ")[2] for case in rank] == [
        "dense, fullrank", "cola, vanilla", "cola, btp as published", "cola, btp", "cola, btp, recompute latent",
    ]  # fmt: skip
    for parts in rank.values():
        assert min(parts[part] for part in ("gemm", "attention", "elementwise", "head", "optimizer")) > 0
        assert parts["attention by flash"] == 1
        assert 0 < parts["MFU"] < parts["HFU"]


@pytest.mark.nightly
def test_computing_again_is_arithmetic_that_the_model_does_not_need(rank: Figures) -> None:
    surplus = {case.partition(": ")[2]: parts["HFU"] / parts["MFU"] for case, parts in rank.items()}
    assert surplus["cola, btp as published"] > surplus["cola, btp, recompute latent"] > surplus["cola, btp"]


@pytest.mark.nightly
def test_the_communication_is_the_plans(rank: Figures) -> None:
    """Two blocks of the ledger's counts; what the head and the gradients' norm send comes on top, for all alike."""
    link, tokens = LINKS["fabric-200g"], 16

    def blocks(**parallelism: object) -> float:
        spec = JobSpec.model_validate(
            {
                "name": "bench",
                "model": {"preset": "tiny", "num_hidden_layers": 2},
                "parallelism": {"tensor_parallel_size": 2, **parallelism},
                "training": {"steps": 1},
            }
        )
        payloads = [payload for part in block_exchanges(spec.model, spec.parallelism) for payload in part]
        elements = sum(payload.elements + payload.statistics for payload in payloads)
        return 2 * collective_seconds(link, "all_reduce", 2, 4 * tokens * elements, len(payloads))

    seconds = {case.partition(": ")[2]: parts["modelled fabric-200g"] for case, parts in rank.items()}
    difference = seconds["cola, btp, recompute latent"] - blocks()
    assert seconds["cola, btp"] - blocks() == pytest.approx(difference)
    assert 0 < difference < seconds["cola, btp"]


@pytest.mark.full
def test_kernels_are_timed_against_the_roofline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    assert kernels.main([*AT_A_TINY_SHAPE, "--results", str(path)]) == 0
    found = figures(path)
    assert {"residual_add", "adamw", "rotary", "cross_entropy, gradient"} < found.keys()
    assert found["residual_add"].keys() == {
        f"{direction}, eager{of}" for direction in ("forward", "backward") for of in ("", ", of roofline")
    }
    assert NO_GPU in capsys.readouterr().out


@pytest.mark.nightly
def test_all_reduces_of_live_ranks(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(MEASURED.model_dump_json())
    assert bench.main(["comm", "--ranks", "2", "--largest", "1", "--repeats", "3", "--profile", str(path)]) == 0
    link = MeasuredProfile.model_validate_json(path.read_text()).link
    assert link is not None and link.ranks == 2
    assert 0 <= link.base_seconds < 1 and 0 < link.bytes_per_second < 1e12


def test_nothing_is_timed_when_results_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    with patch.object(kernels, "disagreements", return_value=["residual_add is off"]):
        assert kernels.main([*AT_A_TINY_SHAPE, "--results", str(path)]) == 1
    assert not path.exists()
    assert "residual_add is off" in capsys.readouterr().err


@pytest.mark.full
def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(tmp_path / "results.csv")]
    assert rank_benchmark.main(["--family", "dense", "--strategy", "btp", *results]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    assert rank_benchmark.main(["--model", "tiny", "--tp", "3", *results]) == 2
    assert "tensor_parallel_size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["comm", "--ranks", "1"], "start two or more"),
        (["comm", "--profile", "."], "no profile at ."),
        (["profile", "--out", "."], ". is a folder"),
        (["job", "job.yaml", "--out", "."], ". is a folder"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_first(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for measurement in ("measure", "load_job"):
        monkeypatch.setattr(bench, measurement, Mock(side_effect=AssertionError("measured")))
    monkeypatch.setattr(bench.subprocess, "run", Mock(side_effect=AssertionError("started")))
    assert bench.main(arguments) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (rank_benchmark.main, ["--tp", "4"], "give --model, or leave --tp out"),
        (kernels.main, ["--model", "60m", "--tp", "3"], "3 does not divide model.hidden_size=512"),
        (kernels.main, ["--model", "60m", "--tp", "16"], "16 does not divide model.num_attention_heads=8"),
        (kernels.main, ["--results", "."], ". is a folder"),
        (rank_benchmark.main, ["--results", "."], ". is a folder"),
    ],
)
def test_what_cannot_be_timed_is_refused_first(
    main: Callable[[list[str]], int], arguments: list[str], says: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "memory_bandwidth", Mock(side_effect=AssertionError("measured")))
    monkeypatch.setattr(rank_benchmark, "matrix_rate", Mock(side_effect=AssertionError("measured")))
    monkeypatch.setattr(kernels, "wrong_results", lambda device: [])
    results = [] if "--results" in arguments else ["--results", "results.csv"]
    assert main([*arguments, *results]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpus", "more"), [(1, []), (2, ["--ranks", "3"])])
def test_ranks_of_nccl_have_a_gpu_each(gpus: int, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with (
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "device_count", return_value=gpus),
        patch.object(bench.subprocess, "run", side_effect=AssertionError("started")),
    ):
        assert bench.main(["comm", *more]) == 2
    said = capsys.readouterr().err
    assert f"this machine has {gpus}:" in said
    assert ("give --ranks" in said) == (gpus > 1)


def unwritten(out: torch.Tensor, payload: torch.Tensor, **_: object) -> Work:
    """A collective of a fake process group that leaves poison where its result should be."""
    out.fill_(float("nan"))
    return FakeWork()


@pytest.fixture
def poisoned_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(communicator_module, name, unwritten)
    monkeypatch.setattr(communicator_module.dist, "all_to_all_single", unwritten)


@pytest.mark.usefixtures("poisoned_group")
def test_a_group_that_writes_no_results_is_made_up_for(tmp_path: Path) -> None:
    spec = tiny_job(write_corpus(tmp_path / "corpus"), "unused", model={"tie_embeddings": True})
    sampler, diverged = Sampler(load_corpus(spec.data, 32), 32, 0), []
    with alone(2):
        for communicator in (Communicator, LoneCommunicator):
            state = TrainState.initial(spec, torch.device("cpu"), draw_weights, communicator=communicator)
            diverged.append(training_step(state, sampler).diverged)
        lone = LoneCommunicator(dist.group.WORLD, "tp", CommunicationLedger())
        x_Tc = torch.arange(6.0).view(3, 2)
        assert torch.equal(lone.all_gather(x_Tc, ""), torch.stack([x_Tc, x_Tc]))
        x_pTc = torch.stack([x_Tc, x_Tc + 6])
        assert torch.equal(lone.reduce_scatter(x_pTc, ""), x_Tc)
        assert torch.equal(lone.all_to_all(x_pTc, ""), x_pTc)
    assert diverged == [True, False]


@pytest.mark.full
def test_a_captured_step_is_timed_beside_the_same_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "obstacle", lambda *_: None)
    monkeypatch.setattr(step_graph, "CudaGraph", RecordedGraph)
    shape = RunShape("tiny", 2, 1, 16, layers=1)
    (variant,) = (each for each in VARIANTS if each.name == "cola, btp")
    rows = {row.quantity: row.p50 for row in rank_rows(shape, variant, torch.device("cpu"), 2, 1e9, [])}
    assert rows["step"] > 0 and rows["step, not captured"] > 0
    assert rows["HFU"] > rows["MFU"]  # whose operations are counted as they are done


@pytest.mark.full
def test_the_published_step_computes_nothing_again_not_even_logits() -> None:
    shape = RunShape("tiny", 2, 1, 16, layers=1)
    rows = {row.quantity: row.p50 for row in rank_rows(shape, PUBLISHED, torch.device("cpu"), 2, 1e9, [])}
    assert min(rows[part] for part in ("gemm", "attention", "elementwise", "head", "optimizer")) > 0
    assert rows["HFU"] == pytest.approx(rows["MFU"], rel=0.01)


def test_nothing_is_timed_of_steps_that_diverge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.csv"
    chosen = ["--family", "cola", "--strategy", "vanilla", "--layers", "1", "--results", str(path)]
    left_out = StepResult(loss=5.5, gradient_norm=math.inf, learning_rate=0.1, diverged=True, requests=Requests())
    with (
        patch.object(kernels, "wrong_results", return_value=[]),
        patch("boost_core.bench.rank.training_step", return_value=left_out),
    ):
        assert rank_benchmark.main([*AT_A_TINY_SHAPE, *chosen]) == 1
    assert not path.exists()
    assert "diverges, with a loss of 5.5 and a gradient norm of inf" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["bench", "data"])
def test_the_command_hands_its_arguments_on(module: str) -> None:
    with patch("service.cli.commands.local.subprocess.Popen") as started:
        started.return_value.__enter__.return_value.wait.return_value = 2
        result = CliRunner().invoke(app, [module, "some", "--model", "7b", "--help"])
    assert result.exit_code == 2
    program, _, _, *arguments = started.call_args.args[0]
    assert (program, arguments) == (sys.executable, [f"boost_core.{module}", "some", "--model", "7b", "--help"])


def test_one_value_is_its_own_spread() -> None:
    assert Row.of("a", "step", "s", 2.0) == Row("a", "step", "s", 2.0, 2.0, 2.0)
    assert Row.of("a", "step", "s", 1.0, 2.0) == Row("a", "step", "s", 1.2, 1.5, 1.8)


def test_a_table_has_a_line_a_case() -> None:
    rows = [Row("a", "step", "s", 0.1, 0.2, 0.3), Row.of("b", "peak memory", "bytes", 2**31)]
    header, first, second = table(rows, 80).splitlines()
    assert header.split() == ["step", "peak", "memory"]
    assert first.split() == ["a", "200.000", "ms", "(100.000", "–", "300.000)", "–"]
    assert second.split() == ["b", "–", "2.00", "GiB"]
    assert len(header) == len(first) == len(second)
