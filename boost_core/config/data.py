"""What to train on."""

from typing import Any, Literal

from pydantic import Field, field_validator

from boost_core.config.base import Config
from boost_core.config.urls import refuse_unknown_scheme


class TextSource(Config):
    """Where training text comes from.

    ``standard_library`` is the source text of the user's own Python installation: real input that is
    there without a download. ``text`` takes local paths, globs, folders and fsspec URLs.
    """

    kind: Literal["standard_library", "text"] = "standard_library"
    paths: tuple[str, ...] = Field(
        (), validate_default=True, description="Files, folders, globs or fsspec URLs; for kind=text."
    )

    @field_validator("paths")
    @classmethod
    def _paths_belong_to_text(cls, value: tuple[str, ...], info: Any) -> tuple[str, ...]:
        kind = info.data.get("kind")
        if kind == "text" and not value:
            raise ValueError("kind=text needs at least one path, glob or URL in paths")
        if kind == "standard_library" and value:
            raise ValueError("kind=standard_library takes no paths; use kind=text to train on your own files")
        for path in value:
            refuse_unknown_scheme(path)
        return value


class DataConfig(Config):
    """What to train on. Files are split whole into a training and a held-out part."""

    source: TextSource = TextSource()
    held_out_fraction: float = Field(0.05, gt=0, lt=1, description="Share of the files kept for evaluation.")
