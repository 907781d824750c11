"""What a process on the mock orders of it."""

import ctypes

_mock = ctypes.CDLL(None)  # loaded before all others


def logging(on: bool) -> None:
    """Log calls, or do not; what is wrong always is."""
    _mock.mock_gpu_logging(int(on))


def mark(text: str) -> None:
    """Log a line, ``mark`` and this text."""
    _mock.mock_gpu_mark(text.encode())


def hang() -> None:
    """Begin no further collective of this process: the others wait for it."""
    _mock.mock_gpu_hang()


def late(seconds: float) -> None:
    """Begin this process's next collective later."""
    _mock.mock_gpu_late(ctypes.c_double(seconds))


def break_device(error: int) -> None:
    """Let every call fail from now on: 700 is an illegal access, 214 an ECC error."""
    _mock.mock_gpu_break(error)
