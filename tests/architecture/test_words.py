"""Names that the glossary says are not used."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_USED = {
    name
    for line in (ROOT / "docs/glossary.md").read_text().partition("## Names not used")[2].splitlines()
    if line.startswith("| `")
    for name in re.findall(r"`(\w+)`", line.split("|")[1])
}


def names(tree: ast.AST) -> set[str]:
    """All names that a file defines or uses."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
    return found


def test_code_uses_the_words_of_the_glossary() -> None:
    assert len(NOT_USED) > 20
    files = [path for package in ("boost_core", "service") for path in (ROOT / package).rglob("*.py")]
    wrong = {str(path.relative_to(ROOT)): names(ast.parse(path.read_text())) & NOT_USED for path in files}
    assert not {file: found for file, found in wrong.items() if found}, "docs/glossary.md has the words to use"
