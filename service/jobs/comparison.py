"""Jobs side by side: the fields in which their specs differ."""

from collections.abc import Iterator, Sequence
from typing import Any

from boost_core.config import JobSpec
from service.models.jobs import DifferingField


def differing_fields(specs: Sequence[JobSpec]) -> list[DifferingField]:
    """The fields in which some specs differ, in the order of the job file.

    Args:
        specs: The specs, with all defaults, presets and chosen layouts filled in.
    """
    resolved = [dict(_fields(spec.model_dump(mode="json"))) for spec in specs]
    # What their users decided; the rest of a model with a preset, for example, follows from that.
    submitted = [dict(_fields(spec.with_layouts(None).as_written())) for spec in specs]
    differing = []
    for field in dict.fromkeys(field for fields in resolved for field in fields):
        values, written = ([fields.get(field) for fields in forms] for forms in (resolved, submitted))
        if any(value != values[0] for value in values):
            differs = any(value != written[0] for value in written)
            differing.append(DifferingField(field=field, values=values, submitted=differs))
    return differing


def _fields(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a spec with their paths and values; a list of plain values is one value, an empty one none."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _fields(value, f"{path}.{name}" if path else name)
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        for number, value in enumerate(content):
            yield from _fields(value, f"{path}[{number}]")
    elif content is not None and content != []:
        yield path, content
