"""Job ids that sort by time of submission."""

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # base 32 without letters that are easily misread
_TIME_DIGITS = 11  # 55 bits of microseconds: enough for a thousand years
_RANDOM_DIGITS = 5


def new_job_id() -> str:
    """A new id of a job."""
    return _new_id("job")


def new_dataset_id() -> str:
    """A new id of a dataset."""
    return _new_id("dataset")


def _new_id(kind: str) -> str:
    """The kind, the time in microseconds, and random digits to distinguish simultaneous ids."""
    microseconds = time.time_ns() // 1_000
    chance = secrets.randbits(5 * _RANDOM_DIGITS)
    return f"{kind}-{_digits(microseconds, _TIME_DIGITS)}{_digits(chance, _RANDOM_DIGITS)}"


def _digits(number: int, count: int) -> str:
    return "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in reversed(range(count)))
