"""What the import contracts cannot see: what is really loaded when a process starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = {"torch", "triton", "tokenizers", "pyarrow", "safetensors", "numpy"}
RAY_TRAIN = {"ray.train", "pandas"}  # take a second and 100 MB


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("service.serve, service.api.app, service.cli.main, service.gang.ray.supervisor", TRAINERS | RAY_TRAIN),
        ("service.gang.ray.actors, service.gang.worker.spare_copy", {"torch"} | RAY_TRAIN),
        ("service.client, service.cli.main", {"ray", "fastapi", "sqlalchemy"}),
        ("boost_core.config, boost_core.plan", TRAINERS),
        ("boost_core.train, boost_core.__main__", {"ray"}),
        ("boost_core.data.corpus", {"pyarrow"}),  # ranks that read shards of tokens do without
    ],
)
def test_importing_leaves_out(modules: str, absent: set[str]) -> None:
    code = f"import sys, {modules}; print({absent!r} & sys.modules.keys() or 'all')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "all\n"


ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    return {name for node in ast.walk(ast.parse(path.read_text())) for name in imported_by(node)}


def imported_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        return {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return set()


@pytest.mark.parametrize("floor", ["model", "optim", "data", "kernels"])
def test_collectives_are_left_to_the_parallel_floor(floor: str) -> None:
    files = list((ROOT / "boost_core" / floor).rglob("*.py"))
    assert files
    assert not [path for path in files if "torch.distributed" in imported(path)]


def test_a_model_never_asks_how_many_ranks_there_are() -> None:
    files = list((ROOT / "boost_core/model").rglob("*.py"))
    assert files
    for path in files:
        text = path.read_text()
        assert not [word for word in ("tensor_parallel_size", "world_size", "tp_size", ".rank()") if word in text], path


def test_one_room_knows_ray_train() -> None:
    files = [path for root in ("boost_core", "service") for path in (ROOT / root).rglob("*.py")]
    found = [path for path in files if any(name.startswith("ray.train") for name in imported(path))]
    assert {path.parent.name for path in found} == {"ray_train"}


def test_only_the_guarded_readers_of_torchs_index_import_pickle() -> None:
    """Whoever loads a pickle runs what it says, so ranks send each other JSON and tensors."""
    files = [path for root in ("boost_core", "service") for path in (ROOT / root).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if imported(path) & {"pickle", "cloudpickle", "dill"}}
    assert found == {"boost_core/checkpoint/folder.py", "boost_core/checkpoint/resharding.py"}


@pytest.mark.parametrize("program", ["boost_core/config/user_files.py", "service/gang/ray/fork_client.py"])
def test_programs_that_run_by_themselves_load_the_standard_library_alone(program: str) -> None:
    """They run isolated from packages, and within seconds and little memory; functions may import more."""
    tree = ast.parse((ROOT / program).read_text())
    names = {name.partition(".")[0] for node in tree.body for name in imported_by(node)}
    assert "sys" in names and names <= sys.stdlib_module_names
