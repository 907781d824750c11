"""The table of the chart's values in its README: ``python -m deploy.values_table`` writes it anew.

What a value means is said once: in the ``# --`` comment above it in values.yaml, and for what is within lists in the
description of values.schema.json.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1] / "helm" / "boost"
BEGIN, END = "<!-- values: written by python -m deploy.values_table -->", "<!-- end of values -->"

Row = tuple[str, str, str]


def rows(text: str, schema: dict[str, Any]) -> Iterator[Row]:
    """Name, default and meaning of each value.

    Args:
        text: The content of values.yaml.
        schema: That of values.schema.json.

    Raises:
        ValueError: A value has no comment.
    """
    lines = text.splitlines()
    for path, key, value in _leaves(yaml.compose(text, yaml.SafeLoader), ()):
        meaning = _comment(lines, key.start_mark.line)
        if meaning is None:
            raise ValueError(f"{'.'.join(path)} in values.yaml has no comment; write `# -- …` in the line above it")
        default = json.dumps(yaml.safe_load(yaml.serialize(value)), ensure_ascii=False)
        items = _at(schema, path).get("items", {}).get("properties", {})
        yield ".".join(path), default if not items or default == "[]" else "see values.yaml", meaning
        for name, item in items.items():
            yield f"{'.'.join(path)}[].{name}", "", item["description"]


def table(found: Iterator[Row]) -> str:
    """The rows in Markdown."""
    cells = ((f"`{name}`", f"`{default}`" if default else "", meaning) for name, default, meaning in found)
    body = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells)
    return f"| value | default | meaning |\n|---|---|---|\n{body}"


def readme_with_table(readme: str, made: str) -> str:
    """A README whose table is this one."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def current() -> str:
    """The README as it should be."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    made = table(rows((CHART / "values.yaml").read_text(encoding="utf-8"), schema))
    return readme_with_table((CHART / "README.md").read_text(encoding="utf-8"), made)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Values and maps without a shape of their own, which are written with braces or as the last that is commented."""
    for key, value in node.value:
        here = (*path, key.value)
        if isinstance(value, yaml.MappingNode) and value.value and not _is_one_value(here):
            yield from _leaves(value, here)
        else:
            yield here, key, value


def _is_one_value(path: tuple[str, ...]) -> bool:
    return path[-1] in ("resources", "labels", "annotations")


def _comment(lines: list[str], line: int) -> str | None:
    """The comment that ends right above a line."""
    said: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        said.insert(0, lines[line].lstrip().removeprefix("#").strip())
        if said[0].startswith("-- "):
            return " ".join([said[0].removeprefix("-- "), *said[1:]])
    return None


def _at(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        schema = schema["properties"][key]
    return schema


if __name__ == "__main__":
    (CHART / "README.md").write_text(current(), encoding="utf-8")
