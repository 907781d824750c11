"""The files named by torch's index of a checkpoint, read without torch and without executing anything in it."""

import io
import pickle
from typing import Any

INDEX = ".metadata"


def files_named(index: bytes) -> set[str]:
    """Names of the files that hold the tensors according to torch's index, which is a pickle.

    Raises:
        ValueError: The content is not such an index.
    """
    try:
        stored = _Reader(io.BytesIO(index)).load().state["storage_data"]
        return {str(place.state["relative_path"]) for place in stored.values()}
    except Exception as error:  # a pickle can raise anything
        raise ValueError(f"is not a torch checkpoint index: {type(error).__name__}: {error}") from error


class _Anything:
    """Stands in for any class that a pickle names, and keeps the state given to it."""

    state: Any = None

    def __new__(cls, *_: object) -> "_Anything":
        return super().__new__(cls)

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def find_class(self, _module: str, _name: str) -> type[_Anything]:
        return _Anything
