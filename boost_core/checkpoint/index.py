"""What torch's index of a checkpoint names, read without torch, and without running anything of it."""

import io
import pickle
from typing import Any

INDEX = ".metadata"


def files_named(index: bytes) -> set[str]:
    """Names of the files that torch's index, a pickle, says the tensors are in.

    Raises:
        ValueError: The content is not such an index.
    """
    try:
        stored = _Reader(io.BytesIO(index)).load().state["storage_data"]
        return {str(place.state["relative_path"]) for place in stored.values()}
    except Exception as error:  # of all the kinds that a pickle can raise
        raise ValueError(f"is not a torch checkpoint index: {type(error).__name__}: {error}") from error


class _Anything:
    """Stands for whatever class a pickle asks for; keeps the state that it would have given to it."""

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
