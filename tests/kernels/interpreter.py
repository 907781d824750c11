"""Triton's interpreter, but for its rounding to 8 bits: where a mantissa overflows, it leaves the exponent alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

convert = interpreter._convert_float


def convert_as_torch(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if (source, target) != (tl.float32, tl.float8e4nv):
        return convert(values, source, target, rounding)
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@contextmanager
def rounding_to_fp8_as_torch() -> Iterator[None]:
    with patch.object(interpreter, "_convert_float", convert_as_torch):
        yield
