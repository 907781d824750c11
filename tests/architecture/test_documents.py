"""What the documents say of the code that a reader would have to count."""

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch.distributed as dist
import typer

from boost_core import __version__
from service.cli.main import app
from service.client.api import Api
from service.settings import Settings

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
API = (ROOT / "docs/api.md").read_text()
CONCEPTS = (ROOT / "docs/concepts.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
RAYS_OWN = re.compile(r"\b_raylet\b|\bray\.(?:\w+\.)*_\w+|\bray\.core\b")

# What ranks send each other by, and what makes them wait for each other.
COLLECTIVES = {
    name
    for name in vars(dist)
    if re.match(r"(all_|reduce|broadcast|gather|scatter|batch_isend|i?send|i?recv|barrier|monitored_barrier)", name)
    and callable(getattr(dist, name))
}


@cache
def names() -> dict[str, set[str]]:
    """The dotted names in each of our files, those of imports with their module."""
    paths = [path for package in ("boost_core", "service") for path in (ROOT / package).rglob("*.py")]
    return {str(path.relative_to(ROOT)): set(dotted(ast.parse(path.read_text()))) for path in paths}


def dotted(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def in_backticks(text: str, ending: str = "") -> set[str]:
    return set(re.findall(rf"`([\w./]+{re.escape(ending)})`", text))


def habit(beginning: str) -> str:
    (found,) = [each for each in CONTRIBUTING.split("\n- ") if each.startswith(beginning)]
    return found


def paragraph(beginning: str) -> str:
    (found,) = [each for each in re.split(r"\n+- |\n\n", CONCEPTS) if each.startswith(beginning)]
    return found


def test_collectives_are_where_contributing_says() -> None:
    found = {
        path.removeprefix("boost_core/")
        for path, used in names().items()
        if any(name.startswith("dist.") and name.removeprefix("dist.") in COLLECTIVES for name in used)
    }
    assert "parallel/communicator.py" in found
    assert found | {"parallel/pipeline.py"} == in_backticks(habit("Every collective"), ".py")


def test_the_environment_is_read_where_contributing_says() -> None:
    found = {
        path.removeprefix("service/")
        for path, used in names().items()
        if any(re.search(r"\b(environb?|getenv|putenv|BaseSettings)$", name) for name in used)
    }
    said = {path.removeprefix("service/") for path in in_backticks(habit("Environment variables"), ".py")}
    assert found == said


def test_rays_own_modules_are_used_in_the_files_that_concepts_names() -> None:
    found = {path for path, used in names().items() if any(map(RAYS_OWN.search, used))}
    elsewhere = {path for path in found if not path.startswith("service/gang/ray_train/")}
    assert elsewhere == {"service/gang/ray/private_api.py"} < found
    assert elsewhere <= in_backticks(CONCEPTS, ".py") and "`service/gang/ray_train/`" in CONCEPTS


def test_each_private_name_of_ray_stands_in_one_table() -> None:
    path = "service/gang/ray/private_api.py"
    table = str(ast.get_docstring(ast.parse((ROOT / path).read_text()))).replace("…", "ray.train.v2._internal.")
    version, *_ = re.findall(r"Checked in Ray ([\d.]+):", table)
    assert version == importlib.metadata.version("ray")
    rows = set(re.findall(r"^    (\S+): ", table, re.MULTILINE))
    imports = {
        f"{node.module}.{alias.name}"
        for file in (ROOT / "service").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    private = {name for name in imports if RAYS_OWN.search(name)}
    assert len(private) > 20
    assert [name for name in private if not any(name == row or name.startswith(f"{row}.") for row in rows)] == []


def test_each_call_into_rays_own_modules_is_named_in_concepts() -> None:
    tree = ast.parse((ROOT / "service/gang/ray/private_api.py").read_text())
    receivers = r"(services|node|memory|raylet\.\w+(\.instance\(\))?|.*GcsClient\(.*\)|gcs)"
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [name.rpartition(".")[2] for name in calls if re.fullmatch(rf"{receivers}\.(?!instance)\w+", name)]
    said = paragraph("`service/gang/ray/private_api.py` calls")
    assert len(called) >= 9
    others = {
        "print_to_stdstream",
        "ENABLE_RAY_CLUSTER",
        "ActorClassID",
        "_temp_dir",
        "service/gang/ray/private_api.py",
        "service/gang/ray/gangs.py",
    }
    assert set(called) == in_backticks(said) - others


def test_every_file_that_a_document_names_is_there() -> None:
    for document in [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for path in in_backticks(document.read_text(), ".py"):
            folders = [ROOT, ROOT / "boost_core", ROOT / "service"]
            assert "/" not in path or any((folder / path).exists() for folder in folders), (document.name, path)


def test_every_setting_is_in_operations() -> None:
    said = set(re.findall(r"`(BOOST_\w+)`", OPERATIONS))
    assert said == {f"BOOST_{name.upper()}" for name in Settings.model_fields}


def commands_of(group: typer.Typer) -> list[str]:
    command = typer.main.get_command(group)
    assert isinstance(command, typer.core.TyperGroup)
    return list(command.commands)


def test_every_command_and_every_method_of_the_client_is_in_the_api() -> None:
    _, _, commands = API.partition("## The command line")
    assert [command for command in commands_of(app) if not re.search(rf"\b{command}\b", commands)] == []
    (sentence,) = re.findall(r"There is a method for each endpoint:(.*?)\. What is safe", API, re.DOTALL)
    assert in_backticks(sentence) == {name for calls in Api.__mro__ for name in vars(calls) if not name.startswith("_")}


def test_the_folders_to_open_first_are_there() -> None:
    rows = re.findall(r"^\| .+ \| `([\w./]+)` \|$", (ROOT / "docs/contributing/README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 20
    assert [path for path in rows if not (ROOT / path).exists()] == []


def test_every_file_that_a_recipe_names_is_there() -> None:
    for recipe in [*ROOT.glob("docs/contributing/*.md"), ROOT / "CONTRIBUTING.md"]:
        paths = re.findall(r"`((?:boost_core|service|tests|deploy|docs|helm)/[\w./]+)`", recipe.read_text())
        assert [path for path in paths if not (ROOT / path).exists()] == [], recipe.name


def test_the_tree_of_rooms_names_every_folder_of_code() -> None:
    _, _, tree = (ROOT / "docs/contributing/README.md").read_text().partition("## The rooms")
    for package in ("boost_core", "service"):
        _, _, rooms = tree.partition(f"    {package}/\n")
        named = set(
            re.findall(r"\b(\w+)/", "\n".join(line for line in rooms.splitlines() if line.startswith("      ")))
        )
        folders = {init.parent.name for init in (ROOT / package).glob("*/__init__.py")}
        assert folders - named == set(), package


def test_the_version_is_the_same_wherever_it_stands() -> None:
    for path, pattern in {
        "CHANGELOG.md": r"^## \[?(\d\S*?)\]? ",
        "deploy/compose/.env.example": r"^BOOST_\w+_TAG=(\d[\d.]*)",
        "deploy/kuberay/api.yaml": r"image: boost-\w+:(\S+)",
        "deploy/kuberay/raycluster.yaml": r"image: boost-\w+:(\S+)",
        "docs/install.md": r"boost-(?:api|trainer):(\d[\d.]*\d)",
        "helm/boost/Chart.yaml": r'^(?:version|appVersion): "?([\d.]+)',
        "helm/boost/ci/cloud-values.yaml": r"^  tag: (\S+)",
        "helm/boost/ci/laptop-values.yaml": r"^  trainerTag: ([\d.]+)",
    }.items():
        found = re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)
        assert found and set(found[:1] if path == "CHANGELOG.md" else found) == {__version__}, path
