"""What users' files say of themselves: whether rows and lines have text, and how many tokens a tokenizer has.

Also a program that reads such content from stdin and prints the answer: it comes from users, and neither what Arrow
makes of damaged schemas nor the parsing of a large JSON, during which Python does nothing else, may take the service's
memory or time. So this file imports nothing of ours.
"""

import json
import resource
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

ARROW_FILE = b"ARROW1"  # begins Arrow files, including Feather; streams begin differently
PARQUET = b"PAR1"  # begins and ends Parquet files
MOST_TOKENIZER_BYTES = 64 * 2**20  # twice the largest published ones, with 260,000 tokens and their merges

_MOST_NAMED = 8
_LONGEST_SHOWN = 200  # characters of a type or a name that are shown: nested types name all that they hold
_MOST_HERE_BYTES = 2**18  # of a tokenizer.json, parsed within milliseconds
_SCHEMA_MEMORY_BYTES = 4 * 2**30  # of addresses, most of which Arrow only reserves
_TOKENIZER_MEMORY_BYTES = 2**30  # twice what the largest published ones need
_MOST_SECONDS = 20.0
_WITHOUT_ARROW = 3  # exit status


def problems_of_schemas(parts: Sequence[bytes], field: str) -> list[str]:
    """What is wrong with each file, by the part of it that holds its schema; empty for a good one.

    Args:
        parts: Of each Parquet and Arrow file its end from the footer on, of each Arrow stream its first message.
        field: Name of the column of text.

    Returns:
        Problems that follow the file's name in a sentence; all empty if Arrow is not installed here.

    Raises:
        ValueError: The schemas cannot be read within bounds of memory and time.
    """
    content = b"".join(struct.pack("<q", len(part)) + part for part in parts)
    try:
        command = [sys.executable, "-I", __file__, "schemas", field]
        done = subprocess.run(command, input=content, capture_output=True, timeout=_MOST_SECONDS)
        if done.returncode == _WITHOUT_ARROW:
            return [""] * len(parts)
        problems: list[str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise ValueError("a schema is damaged, or too large") from error
    return problems


def no_text_column(schema: Any, field: str) -> str:
    """What is wrong with a schema of Arrow's that is to have a column of text; empty for a good one."""
    if (count := schema.names.count(field)) > 1:
        return f"has {count} columns {field!r}; rename all but one, or set text_field (--text-field) to another"
    import pyarrow as pa

    types = {}
    for each in schema:
        of_type = each.type.value_type if pa.types.is_dictionary(each.type) else each.type
        is_text = of_type in (pa.string(), pa.large_string(), pa.string_view())
        types[each.name] = "" if is_text else str(each.type)[:_LONGEST_SHOWN]
    return _no_text("column", types, field)


def no_text_field(record: Mapping[str, Any], field: str) -> str:
    """What is wrong with a JSON object that is to have a field of text; empty for a good one."""
    types = {name: "" if isinstance(value, str) else type(value).__name__ for name, value in record.items()}
    return _no_text("field", types, field)


def _no_text(kind: str, types: Mapping[str, str], field: str) -> str:
    """The same by the types of columns or fields, empty for text."""
    texts = [name for name, of_type in types.items() if not of_type]
    remedy = "convert it: only text is trained on"
    if texts:
        remedy = f"set text_field (--text-field) to a {kind} of text: {_listed(texts)}"
    if field not in types:
        return f"has no {kind} {field!r}, but {_listed([*types])}; {remedy}"
    return types[field] and f"has a {kind} {field!r} that is {types[field]}, not text; {remedy}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (", ".join(repr(name)[:_LONGEST_SHOWN] for name in names[:_MOST_NAMED]) or "nothing") + more


def count_tokens(content: bytes, here: bool = False) -> int:
    """Number of tokens in a ``tokenizer.json`` of Hugging Face's tokenizers; large ones are parsed in another process.

    Args:
        content: The file, of at most ``MOST_TOKENIZER_BYTES``.
        here: Whether to parse it in this process, however large it is.

    Raises:
        ValueError: It is not a ``tokenizer.json``.
    """
    try:
        if not here and len(content) > _MOST_HERE_BYTES:
            command = [sys.executable, "-I", __file__, "tokenizer"]
            done = subprocess.run(command, input=content, capture_output=True, timeout=_MOST_SECONDS, check=True)
            return int(done.stdout)
        tokenizer = json.loads(content)
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", ()))])) + 1
    except (subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a tokenizer.json") from error


def _print_problems(field: str) -> int:
    """Print, as JSON, what is wrong with each schema on stdin; return the exit status."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return _WITHOUT_ARROW
    problems, stdin = [], sys.stdin.buffer
    while length := stdin.read(8):
        part = stdin.read(*struct.unpack("<q", length))
        try:
            if part.endswith(PARQUET):
                schema = pq.ParquetFile(pa.BufferReader(PARQUET + part)).schema_arrow
            elif part.endswith(ARROW_FILE):
                schema = pa.ipc.open_file(pa.BufferReader(ARROW_FILE + b"\0\0" + part)).schema
            else:
                schema = pa.ipc.open_stream(pa.BufferReader(part)).schema
            problems.append(no_text_column(schema, field))
        except (OSError, MemoryError, UnicodeDecodeError, pa.ArrowException) as error:
            problems.append(f"is damaged or cut off: {str(error)[:_LONGEST_SHOWN]}")
    sys.stdout.write(json.dumps(problems))
    return 0


if __name__ == "__main__":
    _memory = _TOKENIZER_MEMORY_BYTES if sys.argv[1] == "tokenizer" else _SCHEMA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (_memory, _memory))
    if sys.argv[1] == "schemas":
        sys.exit(_print_problems(sys.argv[2]))
    sys.stdout.write(f"{count_tokens(sys.stdin.buffer.read(), here=True)}\n")
