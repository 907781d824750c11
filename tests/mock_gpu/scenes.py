"""Scenes of torch on the mock, each a function that asserts what it sees. A process of the mock runs them all.

Prints a line of JSON for each: its name, and what failed or null.
"""

import ctypes
import gc
import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tests.mock_gpu import control


@contextmanager
def refused(part: str) -> Iterator[None]:
    """What is done here raises an error that says this."""
    try:
        yield
    except RuntimeError as error:
        reasons = f"{error}\n{error.__context__}"
        assert part in reasons, reasons
    else:
        raise AssertionError(f"nothing is refused where {part!r} was expected")


def copies_and_fills() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        assert torch.ones(5, device="cuda", dtype=dtype).tolist() == [1] * 5
        assert torch.zeros(5, device="cuda", dtype=dtype).tolist() == [0] * 5
    x = torch.full((3,), 2.5, device="cuda")
    y = torch.empty_like(x).copy_(x)
    assert y.cpu().tolist() == [2.5] * 3
    y.copy_(torch.arange(3.0).pin_memory(), non_blocking=True)
    assert y.tolist() == [0, 1, 2]


def replay() -> None:
    """A graph copies what is in pinned memory when it is replayed."""
    pinned, x, graph = torch.zeros(3).pin_memory(), torch.zeros(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(pinned, non_blocking=True)
    for value in (1.0, 2.0):
        pinned.fill_(value)
        graph.replay()
        assert x.tolist() == [value] * 3


def allocator() -> None:
    """torch's own: what is freed stays reserved, until it is released."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    assert torch.cuda.memory_reserved() - before == 2**30
    del x
    assert torch.cuda.memory_reserved() - before == 2**30
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def out_of_memory() -> None:
    available, total = torch.cuda.mem_get_info()
    assert 79 < total / 2**30 < 80
    try:
        torch.empty(available + 2**30, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError as error:
        assert "79.6" in str(error), error
    else:
        raise AssertionError("there is more than the device has")


def synchronising_in_a_capture() -> None:
    x, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
    with refused("operation not permitted when stream is capturing"), torch.cuda.graph(graph):
        x.item()


def pageable_copy_in_a_capture() -> None:
    x, graph, mine = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph(), torch.ones(1)
    with refused("operation failed due to a previous error during capture"), torch.cuda.graph(graph):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        addresses = map(ctypes.c_void_p, (x.data_ptr(), mine.data_ptr()))
        error = ctypes.CDLL(None).cudaMemcpyAsync(*addresses, ctypes.c_size_t(4), 1, stream)
        assert error == 900, error  # cudaErrorStreamCaptureUnsupported


def captured_event() -> None:
    x, graph, event = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        x += 1
        event.record()
    with refused("CapturedEvent"):
        event.query()


def unjoined_stream() -> None:
    x, graph, side = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with refused("StreamCaptureUnjoined"), torch.cuda.graph(graph):
        x += 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x += 1


def joined_stream() -> None:
    x, graph, side = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        x += 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x += 1
        torch.cuda.current_stream().wait_stream(side)
    graph.replay()


def triton_launch() -> None:
    """Triton's own launcher: it refuses memory that a kernel cannot read."""
    from boost_core.kernels.residual_add import residual_add

    x = torch.ones(4, 256, device="cuda", dtype=torch.bfloat16)
    residual_add(x, x)


def cudnn() -> None:
    """It is not modelled, and refused as soon as torch asks for it."""
    x = torch.ones(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION), refused("cuDNN"):
        torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def attention_left_to_torch() -> None:
    """On an H100 it chooses cuDNN's."""
    x = torch.ones(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    chosen = torch.nn.attention.SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True))
    assert chosen == torch.nn.attention.SDPBackend.CUDNN_ATTENTION


def flash_attention() -> None:
    x = torch.ones(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert out.shape == x.shape


def broken_device() -> None:
    """The last one: after an illegal access nothing works any more."""
    x = torch.ones(1, device="cuda")
    control.break_device(700)
    for _ in range(2):
        with refused("an illegal memory access was encountered"):
            x.item()


SCENES = {
    each.__name__: each
    for each in (
        copies_and_fills, replay, allocator, out_of_memory, synchronising_in_a_capture, pageable_copy_in_a_capture,
        captured_event, unjoined_stream, joined_stream, triton_launch, cudnn, attention_left_to_torch, flash_attention,
        broken_device,
    )
}  # fmt: skip


def main() -> None:
    for name, scene in SCENES.items():
        control.mark(name)
        try:
            scene()
            error = None
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main()
