"""The number of tokens in a ``tokenizer.json`` of Hugging Face's tokenizers.

Also a program that reads one from stdin and prints the number: Python does nothing else while it parses JSON, so a
service that parsed a large one itself would stall for seconds.
"""

import json
import resource
import subprocess
import sys

MOST_BYTES = 64 * 2**20  # twice the largest published ones, with 260,000 tokens and their merges

_MOST_HERE_BYTES = 2**18  # parsed within milliseconds
_MOST_MEMORY_BYTES = 2**30  # twice what the largest published ones need
_MOST_SECONDS = 20.0


def count_tokens(content: bytes) -> int:
    """Number of tokens in a ``tokenizer.json``; large ones are parsed in a separate process.

    Args:
        content: The file, of at most ``MOST_BYTES``.

    Raises:
        ValueError: It is not a ``tokenizer.json``.
    """
    if len(content) <= _MOST_HERE_BYTES:
        return _count(content)
    try:
        command = [sys.executable, "-I", __file__]
        return int(
            subprocess.run(command, input=content, capture_output=True, timeout=_MOST_SECONDS, check=True).stdout
        )
    except (subprocess.SubprocessError, ValueError) as error:
        raise ValueError("not a tokenizer.json") from error


def _count(content: bytes) -> int:
    try:
        found = json.loads(content)
        vocabulary = found["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([*ids, *(token["id"] for token in found.get("added_tokens", ()))])) + 1
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a tokenizer.json") from error


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    sys.stdout.write(f"{_count(sys.stdin.buffer.read())}\n")
