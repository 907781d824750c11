"""Peak rates of devices and links, and the size of an element of each type: stated here and nowhere else.

Rates are the data sheets' peaks; the plan estimates what fraction of them is reached.
"""

import os
import re
import shutil
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Bytes of an element that is stored or sent at each precision; in fp8 only the operands of products are in 8 bits.
BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}

ACCELERATOR_LABEL = "ray.io/accelerator-type"  # set by Ray on nodes with GPUs


class Shares(NamedTuple):
    """What training reaches of a data sheet's peaks.

    Attributes:
        products: Share of the dense peak in large matrix products.
        attention: The same in torch's flash attention, forward and backward, of the pairs that a causal mask leaves.
        source: Where they come from.
        cudnn: The same in cuDNN's, of heads of ``CUDNN_HEAD``, from each length of a sequence on; empty where the
            trainer prefers flash attention (``model.attention.backends``).
    """

    products: float
    attention: float
    source: str
    cudnn: tuple[tuple[int, float], ...] = ()


# Products were fitted to every second of the runs in ``tests/benchmarks/published_runs.csv``, and on an A100 also to
# BOOST's 1B and 3B rows (``tests/unit/test_published_times.py``). An H100's peak is further away as its power limit
# lowers the clock in long products.
_AMPERE = Shares(
    0.80, 0.45, "fitted to published runs on A100s; FlashAttention-2 alone reaches 0.5 to 0.73 (arXiv 2307.08691)"
)  # fmt: skip
#
# cuDNN's are what NVIDIA publishes of version 9.1 beside torch's flash attention, bf16 with a causal mask: 468, 490 and
# 520 TFLOP/s forward and backward, and 264, 290 and 311 (NVIDIA/cudnn-frontend at 505fcfe, benchmark_results.csv). The
# forward passes of arXiv 2407.08608, figure 5, are 4 to 8 % slower with cuDNN's, at a fixed clock of 1.83 GHz. On a
# GB200 version 9.27 reaches 0.46 to 0.55 of the peak (benchmark/attention_training/results/llama3.1/gb200 at d6d35d6).
CUDNN_HEAD = 128
_HOPPER = Shares(
    0.665, 0.30, "products fitted to published runs on H100s; FlashAttention-2's 262 to 335 TFLOP/s with a causal mask "
    "(arXiv 2407.08608, figure 5), of 989; cuDNN's 468 to 520 (NVIDIA/cudnn-frontend, benchmark_results.csv)",
    ((4096, 0.47), (8192, 0.50), (16_384, 0.53)),
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
        words: Words that occur in the names that CUDA or Ray gives to such devices.
        tflops: TFLOP/s of dense products at each precision. Data sheets give bf16 with sparsity; dense is half of it.
            fp32 is the rate without TF32, which the trainer leaves off. Devices without fp8 have bf16's rate,
            since the trainer then computes in bf16; those whose tensor cores lack bf16 have fp32's. fp64 is the rate
            without tensor cores.
        source: The data sheet.
        bandwidth: Memory bandwidth, in bytes per second.
        host_bandwidth: Bandwidth of the link to the host's memory in one direction, in bytes per second.
        fp8_speedup: Speed of products in fp8 relative to bf16.
        shares: What training reaches of its peaks.
        link: Name in ``LINKS`` of what joins such devices in a node.
        network_gigabits: Gb/s that each device usually has to other nodes.
        watts: The most that the board draws; ``None`` if it is not known.
        precisions: Those that it computes products in, which are those with a rate of their own: bf16, with torch's
            flash attention, from Ampere on (compute capability 8.0), fp8 from Ada on (8.9).
        node_gpus: Number of them that a node usually has.
        rack_nodes: Number of nodes that ``link`` joins, too; 1 if it ends at the node.
        memory: Bytes of memory by the name of each variant, Ray's where it has one. Gigabytes as in NVIDIA's data
            sheets, which are some 6 % less than what CUDA reports; of cards that keep the codes of their ECC in GDDR6,
            of which CUDA reports 0 to 3 % less than the sheet: 6 % less than that.
    """

    words: tuple[str, ...]
    tflops: Mapping[str, float]
    source: str
    bandwidth: float
    host_bandwidth: float
    fp8_speedup: float
    shares: Shares
    link: str
    network_gigabits: float
    watts: int | None
    precisions: tuple[str, ...]
    node_gpus: int
    rack_nodes: int
    memory: Mapping[str, int]


# GB/s to the host in one direction, over sixteen lanes; data sheets give both directions together, also for NVLink-C2C.
_TO_HOST = {"pcie 3": 16, "pcie 4": 32, "pcie 5": 64, "c2c": 450}

# NVIDIA's data sheets: TFLOP/s in fp8, bf16 and fp32, TB/s of memory, watts, the link to the host, the link in a node,
# Gb/s to other nodes, words if not the first of the sheet's name, and GB of memory by name.
#
# GeForce cards' products in 16 bits are summed in fp32, at half of the rate that is advertised. The network is that of
# NVIDIA's own systems (DGX-1 V100: 4 × 100 Gb/s for 8; DGX A100: 8 × 200; DGX H100 and B200: 8 × 400), or of clouds'
# nodes of eight (AWS g4dn.metal, g5.48xlarge and g6.48xlarge: 100 Gb/s; g6e.48xlarge: 400); of cards for workstations
# one adapter of 100 Gb/s for eight is assumed.
_Sheet = tuple[str, float, float, float, float, int, str, str, float, str, dict[str, int]]
_FROM_HOPPER: tuple[_Sheet, ...] = (
    ("GB200 NVL72", 5000, 2500, 80, 8.0, 1200, "c2c", "nvlink-b200", 400, "", {"GB200": 186}),
    ("HGX B200", 4500, 2250, 75, 8.0, 1000, "pcie 5", "nvlink-b200", 400, "B200", {"B200": 180}),
    ("GH200", 1979, 989, 67, 4.0, 1000, "c2c", "nvlink-h200", 400, "", {"GH200": 96}),
    ("H200 NVL", 1671, 835.5, 60, 4.8, 600, "pcie 5", "pcie-5", 200, "H200 NVL", {"H200-NVL": 141}),
    ("H200", 1979, 989, 67, 4.8, 700, "pcie 5", "nvlink-h200", 400, "", {"H200": 141}),
    ("H100 NVL", 1671, 835.5, 60, 3.9, 400, "pcie 5", "pcie-5", 200, "H100 NVL", {"H100-NVL": 94}),
    ("H100 PCIe", 1513, 756.5, 51, 2.0, 350, "pcie 5", "pcie-5", 200, "H100 PCIe", {"H100-PCIE": 80}),
    ("H100 SXM", 1979, 989, 67, 3.35, 700, "pcie 5", "nvlink-h200", 400, "", {"H100": 80}),
)
_BEFORE_HOPPER: tuple[_Sheet, ...] = (
    ("L40S", 733, 362, 91.6, 0.864, 350, "pcie 4", "pcie-4", 50, "", {"L40S": 45}),
    ("L40", 362, 181, 90.5, 0.864, 300, "pcie 4", "pcie-4", 50, "", {"L40": 45}),
    ("L4", 242, 121, 30.3, 0.3, 72, "pcie 4", "pcie-4", 12.5, "", {"L4": 22}),
    ("RTX 6000 Ada", 728, 364, 91.1, 0.96, 300, "pcie 4", "pcie-4", 12.5, "6000 Ada", {"RTX-6000-ADA": 48}),
    ("RTX 5090", 419, 209.5, 104.8, 1.792, 575, "pcie 5", "pcie-5-host", 12.5, "5090", {"GeForce-RTX-5090": 32}),
    ("RTX 4090", 330.3, 165.2, 82.6, 1.008, 450, "pcie 4", "pcie-4-host", 12.5, "4090", {"GeForce-RTX-4090": 24}),
    ("RTX 3090", 71, 71, 35.6, 0.936, 350, "pcie 4", "pcie-4-host", 12.5, "3090", {"GeForce-RTX-3090": 24}),
    ("RTX A6000", 154.8, 154.8, 38.7, 0.768, 300, "pcie 4", "pcie-4", 12.5, "A6000", {"RTX-A6000": 48}),
    ("A40", 149.7, 149.7, 37.4, 0.696, 300, "pcie 4", "pcie-4", 12.5, "", {"A40": 45}),
    ("A10G", 70, 70, 35, 0.6, 300, "pcie 4", "pcie-4", 12.5, "", {"A10G": 22}),
    ("A10", 125, 125, 31.2, 0.6, 150, "pcie 4", "pcie-4", 12.5, "", {"A10": 22}),
    ("A100 PCIe 40 GB", 312, 312, 19.5, 1.555, 250, "pcie 4", "pcie-4", 100, "A100 PCIe 40GB", {"A100-PCIE-40G": 40}),
    ("A100 PCIe 80 GB", 312, 312, 19.5, 1.935, 300, "pcie 4", "pcie-4", 100, "A100 PCIe", {"A100-PCIE-80G": 80}),
    ("A100 SXM 40 GB", 312, 312, 19.5, 1.555, 400, "pcie 4", "nvlink-a100", 200, "A100 40GB", {"A100-40G": 40}),
    ("A100 SXM 80 GB", 312, 312, 19.5, 2.039, 400, "pcie 4", "nvlink-a100", 200, "", {"A100": 80, "A100-80G": 80}),
    ("V100 SXM2 16 GB", 15.7, 15.7, 15.7, 0.9, 300, "pcie 3", "nvlink-v100", 50, "V100 16GB", {"V100-16G": 16}),
    # Ray calls both V100. As with A100, that is the larger one, so that no job is refused that runs there.
    ("V100 SXM2 32 GB", 15.7, 15.7, 15.7, 0.9, 300, "pcie 3", "nvlink-v100", 50, "", {"V100": 32, "V100-32G": 32}),
    ("T4", 8.1, 8.1, 8.1, 0.32, 70, "pcie 3", "pcie-3", 12.5, "", {"T4": 15}),
)

# The rate in fp64 is half of fp32's on boards for computing, by their sheets; by NVIDIA's white papers a 32nd on Turing
# and a 64th on all others.
_HALF_IN_FP64 = ("GB200", "HGX B200", "GH200", "H200", "H100", "A100", "V100")

# GPUs of a node, and nodes that NVLink joins, where these are not 8, as on HGX boards, and 1: the rack of a GB200 NVL72
# has 18 compute trays of 4 (NVIDIA's GB200 NVL Multi-Node Tuning Guide); a GH200 is a host with one (its data sheet).
_NODES = {"GB200 NVL72": (4, 18), "GH200": (1, 1)}

# The first match for a name wins, so variants come before the general kind.
DEVICES = tuple(
    Device(
        tuple(words.split()) or (sheet.split()[0],),
        {"fp8": fp8, "bf16": bf16, "fp32": fp32,
         "fp64": fp32 * (1 / 2 if sheet.startswith(_HALF_IN_FP64) else 1 / 32 if sheet == "T4" else 1 / 64)},
        f"NVIDIA {sheet} data sheet",
        terabytes * 1e12, _TO_HOST[host] * 1e9, fp8 / bf16, shares, link, network, watts,
        ("fp32", *["bf16"] * (bf16 > fp32), *["fp8"] * (fp8 > bf16)), *_NODES.get(sheet, (8, 1)),
        {name: gigabytes * 10**9 for name, gigabytes in memory.items()},
    )
    for shares, sheets in ((_HOPPER, _FROM_HOPPER), (_AMPERE, _BEFORE_HOPPER))
    for sheet, fp8, bf16, fp32, terabytes, watts, host, link, network, words, memory in sheets
)  # fmt: skip

# Memory in bytes by the names of ``Device.memory``.
DEVICE_BYTES = dict(sorted((name, size) for device in DEVICES for name, size in device.memory.items()))


def device_named(name: str) -> Device | None:
    """Look up a device by its name, for example ``NVIDIA H100 80GB HBM3``; ``None`` if it is not listed.

    Names of ``Device.memory`` are known, too, with or without hyphens and blanks (``H100NVL``, ``RTX4090``), and so are
    those that Kubernetes makes of CUDA's. A part of a GPU, such as ``NVIDIA H100 80GB HBM3 MIG 1g.10gb`` or the vGPU
    ``NVIDIA A40-12Q``, is not: it has a fraction of the rates; nor is a laptop's, which has another chip. Nor is a name
    with a size of memory that no such device has.
    """
    joined = re.sub("[ _-]|NVIDIA", "", name.upper())
    for listed in DEVICES:
        if joined in (each.replace("-", "").upper() for each in listed.memory):
            return listed
    words = re.sub(r"(?<=[0-9])[ _-]?GI?B?(?![A-Z0-9])", "GB", name.upper())  # 40G, 40 GB and 40GiB are the same
    words = re.sub("(?<=RTX)(?=A?[0-9])|(?<=[0-9])(?=NVL|PCIE|SXM|ADA)", " ", words)  # RTX4090 is RTX 4090
    words = re.sub("(?<=NVL)(?=[0-9]+GB)|(?<=PCIE|SXM[0-9])(?=[0-9]+GB)", " ", words)  # PCIE80GB is PCIE 80GB
    there = re.findall(r"[A-Z0-9]+", words)
    written = {*there, *(f"{word}GB" for word in there)}  # A100-40 is A100-40GB
    device = next((device for device in DEVICES if all(word.upper() in written for word in device.words)), None)
    if device is None or any(re.fullmatch("MIG|GRID|LAPTOP|MAX|[0-9]+[ABCQ]", word) for word in there):
        return None
    beside = [word for word in there if word not in map(str.upper, device.words)]
    sizes = {int(size[1]) for word in beside if (size := re.fullmatch(r"([0-9]+)(GB)?", word))}
    if "GH200" in there:
        sizes -= {120, 480}  # its host's, in CUDA's names
    known = [size / 1e9 for size in device.memory.values()]
    # A sheet's size includes what ECC takes of GDDR6, which makes it up to a tenth more.
    return device if all(any(each <= size <= 1.1 * each for each in known) for size in sizes) else None


def memory_named(name: str) -> int | None:
    """Return the bytes of memory of a device by its name, as in ``device_named``; ``None`` if it is not listed."""
    device = device_named(name)
    return None if device is None else min(device.memory.values())


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Dense FLOPs per second at ``fp8``, ``bf16`` or ``fp32``; ``None`` if the device is not listed."""
    device = device_named(device_name)
    return None if device is None else device.tflops[precision] * 1e12


@dataclass(frozen=True)
class Link:
    """A rank's link to its neighbours in a ring.

    Attributes:
        base_seconds: Fixed latency of a collective of any size among any number of ranks.
        hop_seconds: Latency of each step around the ring.
        bytes_per_second: Bandwidth in one direction.
        description: What kind of link it is and where its figures come from.
    """

    base_seconds: float
    hop_seconds: float
    bytes_per_second: float
    description: str


LINK_EFFICIENCY = 0.8  # fraction of the nominal rate that large messages reach: assumed until fitted to a live group


def _ring(name: str, gigabytes: float, hop_microseconds: float) -> Link:
    """A link at 80 % of GB/s in one direction, with NCCL's latencies."""
    tuned = f"NCCL's tuning table for a ring under its Simple protocol (8.4 µs, and {hop_microseconds} µs a step)"
    return Link(8.4e-6, hop_microseconds * 1e-6, LINK_EFFICIENCY * gigabytes * 1e9, f"{name} at 80 %; {tuned}")


def adapter(gigabits: float) -> Link:
    """Return the link between nodes where each GPU has a network adapter of this many Gb/s."""
    return _ring(f"a {gigabits:g} Gb/s adapter a GPU", gigabits / 8, 14)


_SHEET = "{rate} GB/s a direction (NVIDIA's data sheet)"
LINKS = {
    "nvlink-v100": _ring("NVLink 2, " + _SHEET.format(rate=150), 150, 3.4),
    "nvlink-a100": _ring("NVLink 3, " + _SHEET.format(rate=300), 300, 3.4),
    "nvlink-h200": _ring("NVLink 4, " + _SHEET.format(rate=450), 450, 3.4),
    "nvlink-b200": _ring("NVLink 5, " + _SHEET.format(rate=900), 900, 3.4),
    "pcie-3": _ring("PCIe 3, 16 GB/s a direction", 16, 5.7),
    "pcie-4": _ring("PCIe 4, 32 GB/s a direction", 32, 5.7),
    "pcie-5": _ring("PCIe 5, 64 GB/s a direction", 64, 5.7),
    # GeForce drivers have no transfers between cards: all goes into the host's memory and out of it.
    "pcie-4-host": _ring("PCIe 4 through the host, 16 GB/s a direction", 16, 5.7),
    "pcie-5-host": _ring("PCIe 5 through the host, 32 GB/s a direction", 32, 5.7),
    "fabric-200g": adapter(200),
    "fabric-400g": adapter(400),
}
NETWORKS = {device.network_gigabits: adapter(device.network_gigabits) for device in DEVICES}  # usual ones
# 5 ms for 256 KiB and 62 ms for 32 MiB among four processes on two cores: six steps of 0.76 ms, and 0.88 GB/s.
LOOPBACK = Link(0.0, 7.6e-4, 8.8e8, "gloo over loopback, measured among four processes")


# What else a machine needs


def lacks_compiler() -> str | None:
    """Return what this machine lacks to launch Triton's kernels, and what to install, in a sentence; ``None``: nothing.

    Triton compiles a launcher for each kernel in C against Python's headers (``triton.runtime.build``).
    """
    named = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if named is None else (named,))):
        lacks = "no C compiler" if named is None else f"no C compiler {named}, which CC names"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks = "no headers of Python"
    else:
        return None
    return (
        f"this machine has {lacks}, with which Triton compiles the launchers of its kernels: install gcc, libc6-dev "
        "and, with Debian's Python, python3-dev where the workers run, for example in the image of Ray's nodes"
    )
