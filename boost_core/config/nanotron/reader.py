"""Values of a foreign configuration by dotted path, and a record of what became of each."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

_MISSING: Any = object()
_MOST = 10**15
_LONGEST = 200  # characters of a value in a sentence
_OF_MODEL = "model.model_config."

# Sections and fields that affect neither the model nor its trajectory.
_SECTIONS_WITHOUT_EFFECT = ("lighteval", "logging", "metrics_logging", "profiler")
_WITHOUT_EFFECT = {
    "checkpoints.checkpoints_path_is_shared_file_system", "checkpoints.load_lr_scheduler", "checkpoints.load_optimizer",
    "checkpoints.save_final_state", "checkpoints.save_initial_state",
    "general.benchmark_csv_path", "general.consumed_train_samples", "general.entity", "general.ignore_sanity_checks",
    "general.project", "general.step",
    "model.ddp_bucket_cap_mb",
    "optimizer.optimizer_factory.torch_adam_is_fused", "optimizer.torch_adam_is_fused",
    "parallelism.tp_linear_async_communication", "parallelism.tp_mode", "parallelism.tp_recompute_allgather",
    "tokenizer.tokenizer_max_length", "tokenizer.tokenizer_revision",
    "tokens.limit_test_batches",
}  # fmt: skip
_SECTIONS_READ = {"checkpoints", "general", "model", "optimizer", "parallelism", "tokenizer", "tokens"}


class Reader:
    """Reads values by path and tracks which have been read. Null values count as missing.

    Attributes:
        content: The whole configuration.
        notes: What was not carried over, or was changed.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.notes: list[str] = []
        self._values = {path: value for path, value in _leaves(content, "") if value not in (None, {}, [])}
        self._taken: set[str] = set()
        self._refused: list[str] = []

    def take(self, path: str, default: Any = _MISSING) -> Any:
        """Return a value and count it as carried over.

        Raises:
            ValueError: The field is missing and has no default.
        """
        self._taken.add(path)
        value = self._values.get(path, default)
        if value is _MISSING:
            raise ValueError(f"{path} is missing; a configuration of nanotron has it")
        return value

    def whole(self, path: str, default: Any = _MISSING, least: int = 1) -> Any:
        """Return a whole number, or the default.

        Raises:
            ValueError: The value is not a whole number from ``least`` up, or the field is missing without a default.
        """
        value = self.take(path, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            raise ValueError(f"{assignment(path, value)} is not a whole number from {least} to {_MOST:,}")
        return value

    def number(self, path: str, default: Any = _MISSING) -> Any:
        """Return a finite number, or the default.

        Raises:
            ValueError: The value is of another type, or the field is missing and has no default.
        """
        value = self.take(path, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"{assignment(path, value)} is not a finite number")
        return value

    def flag(self, path: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ValueError: It is neither.
        """
        value = self.take(path, default)
        if not isinstance(value, bool):
            raise ValueError(f"{assignment(path, value)} is neither true nor false")
        return value

    def under(self, section: str) -> dict[str, Any]:
        """The values of a section that have not been read, by their path within the section."""
        return {
            path.removeprefix(section): value
            for path, value in self._values.items()
            if path.startswith(section) and path not in self._taken
        }

    def note(self, path: str, value: Any, remark: str) -> None:
        """Note that a value is not carried over, or is changed."""
        self.notes.append(f"{assignment(path, value)}: {remark}")

    def refuse(self, path: str, value: Any, remark: str) -> None:
        """Record a value for which the configuration will be refused."""
        self._refused.append(f"{assignment(path, value)}: {remark}")

    def raise_if_refused(self) -> None:
        """Raise if any value has been refused.

        Raises:
            ValueError: Lists the refused values, one per line.
        """
        if self._refused:
            raise ValueError("\n".join(self._refused))

    def note_the_rest(self) -> None:
        """Note everything unread as not carried over; each unknown section only once."""
        for section in self.content:
            if section in _SECTIONS_READ:
                for path, value in self.under(f"{section}.").items():
                    if f"{section}.{path}" not in _WITHOUT_EFFECT and not f"{section}.{path}".startswith(_OF_MODEL):
                        self.note(f"{section}.{path}", value, "not carried over")
            elif (
                section not in (*_SECTIONS_WITHOUT_EFFECT, "data", "data_stages") and self.content[section] is not None
            ):
                self.note(str(section), "", "this section is not carried over")


def assignment(path: str, value: Any) -> str:
    """Format a path and value for a line on a terminal, truncated if long and without control characters."""
    text = path if value == "" else f"{path}={value}"
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


def _leaves(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else None
    if inner is None or not content:
        yield path, content
        return
    for key, value in inner:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))
