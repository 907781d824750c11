"""Where the time of a profiled step went."""

import re
from typing import Any

PARTS = ("gemm", "attention", "elementwise", "head", "optimizer", "unattributed")

# Names of torch's operations on CPU, and of the kernels of cuBLAS, cuDNN and flash attention on a GPU.
_ATTENTION = re.compile(r"attention|flash|fmha|sdpa", re.IGNORECASE)
_GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|split_?k|aten::(add|b|baddb)?mm|mkl", re.IGNORECASE)


def seconds_by_part(profile: Any) -> dict[str, float]:
    """Return the seconds spent in each part: on a GPU in its kernels, without one in the CPU's operations.

    Args:
        profile: A finished ``torch.profiler.profile``. Work on a GPU that is not linked to an operation is
            ``unattributed``; so is the time the CPU spent between operations.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    events = profile.events()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    host = [event for event in events if event.device_type.name == "CPU"]
    if not on_device:
        for event in host:
            seconds[_part(event, event.name)] += event.self_cpu_time_total / 1e6
        return seconds
    for event in host:
        for kernel in event.kernels:
            seconds[_part(event, kernel.name)] += kernel.duration / 1e6
    total = sum(event.time_range.elapsed_us() for event in on_device if not event.is_user_annotation) / 1e6
    seconds["unattributed"] += max(0.0, total - sum(seconds.values()))
    return seconds


def launches(profile: Any) -> int:
    """Return the number of kernels and copies launched on the GPU."""
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in profile.events())


def _part(event: Any, name: str) -> str:
    """Return the part that an operation's work under a name belongs to: a kernel's name, or its own."""
    around = list(_ancestors(event))
    if any("_HeadLoss" in each for each in around):
        return "head"
    if "optimizer" in around:
        return "optimizer"
    if _ATTENTION.search(name) or any("attention" in each for each in around):
        return "attention"
    if _GEMM.search(name):
        return "gemm"
    return "unattributed" if event.name == name and not name.startswith("aten::") else "elementwise"


def _ancestors(event: Any) -> Any:
    while event is not None:
        yield event.name
        event = event.cpu_parent
