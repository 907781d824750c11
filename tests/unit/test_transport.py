"""What a rank's collectives go over, by lines of NCCL's own log as people have published them in its issues."""

import logging
import os
from pathlib import Path

import pytest

from service.gang.worker import rank_metrics
from service.gang.worker.rank_metrics import TransportCollector, transports

LINES = {
    "H20-GPU-06:4015539:4015652 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA": {"net/ib"},
    "gpu36:20776:20833 [1] NCCL INFO Channel 00/0 : 3[1] -> 4[0] [send] via NET/IBext_v8/5(2)/GDRDMA": {"net/ib"},
    "[1,3]<stdout>:node:102987:103024 [1] NCCL INFO Channel 05/1 : 3[1] -> 0[0] [send] via NET/IB/12/GDRDMA/Shared": {
        "net/ib"
    },
    "ubuntu:9621:9692 [7] NCCL INFO Channel 14/0 : 15[7] -> 0[0] [send] via NET/Socket/0": {"net/socket"},
    "ip-192-168-29-243:26465:26533 [0] NCCL INFO Ring 00 : 7 -> 8 [receive] via NET/AWS Libfabric/0": {
        "net/aws libfabric"
    },
    "kolyoz1:27224:27909 [2] NCCL INFO Channel 02/0 : 2[2] -> 0[0] via P2P/CUMEM": {"p2p"},
    "gpu34:34088:34142 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read": {"p2p"},
    "ip-192-168-16-255:35480:35545 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/IPC": {"p2p"},
    "sh9:3884994:3885029 [7] NCCL INFO Channel 00/0 : 7[7] -> 6[6] via P2P/direct pointer": {"p2p"},
    "ubuntu:39964:40050 [6] NCCL INFO Channel 09 : 6[6] -> 7[7] via SHM/direct/direct": {"shm"},
    # What it could use, and what it is: no connection goes over these.
    "axa:3048391:3048566 [0] NCCL INFO NET/Socket : Using [0]lo:127.0.0.1<0>": set(),
    "axa:3048391:3048566 [0] NCCL INFO Using network Socket": set(),
    "ip-172-31-12-21:45361:45361 [0] NCCL INFO NET/IB : No device found.": set(),
    "8h200-2:14630:14686 [0] NCCL INFO Channel 00/08 : 0 1": set(),
    "8h200-2:14630:14687 [1] NCCL INFO P2P Chunksize set to 131072": set(),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_says_what_a_connection_goes_over(line: str) -> None:
    assert transports(line.encode()) == LINES[line]


def test_all_lines_of_a_log_count() -> None:
    log = "\n".join(LINES).encode()
    assert transports(log) == {"net/ib", "net/socket", "net/aws libfabric", "p2p", "shm"}
    assert transports(b"") == set()


def connected(log: bytes, monkeypatch: pytest.MonkeyPatch, folder: Path) -> TransportCollector:
    """What a rank knows after the first step of a gang, of which NCCL has written this."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "NCCL" not in name})
    monkeypatch.setattr(rank_metrics, "RDMA_DEVICES", folder / "infiniband")
    collector = TransportCollector()
    collector.ask()
    Path(os.environ["NCCL_DEBUG_FILE"]).write_bytes(log)
    collector.begin(0, "nccl", 2)
    collector.after_step()
    return collector


def found(collector: TransportCollector) -> set[str]:
    (family,) = (each for each in collector.collect() if each.name == "boost_gang_transport")
    return {sample.labels["transport"] for sample in family.samples}


def test_a_gang_is_told_of_once_and_the_next_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "boost_core")
    collector = connected("\n".join(LINES).encode(), monkeypatch, tmp_path)
    collector.after_step()
    assert found(collector) == {"net/aws libfabric", "net/ib", "net/socket", "p2p", "shm"}
    told = "the collectives of rank 0 go over net/aws libfabric, net/ib, net/socket, p2p, shm"
    assert [record.message for record in caplog.records if record.name == "boost_core"] == [told]
    collector.begin(0, "nccl", 2)  # and makes no connections
    collector.after_step()
    assert found(collector) == set()
    assert list(tmp_path.glob("*.log")) == [], "nothing is left of it"


def test_what_a_gang_that_ended_early_has_left_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "NCCL" not in name})
    monkeypatch.setattr(rank_metrics, "RDMA_DEVICES", tmp_path / "infiniband")
    collector = TransportCollector()
    collector.ask()
    with Path(os.environ["NCCL_DEBUG_FILE"]).open("ab", buffering=0) as nccl:
        nccl.write(b"node:1:1 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0\n")
        collector.begin(0, "nccl", 2)  # and it is lost before its first step has ended
        collector.ask()
        nccl.write(b"node:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
        collector.begin(0, "nccl", 2)
        collector.after_step()
    assert found(collector) == {"p2p"}


def test_who_asks_nccl_for_a_log_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    collector = TransportCollector()
    collector.ask()
    collector.begin(0, "nccl", 2)
    collector.after_step()
    assert os.environ["NCCL_DEBUG"] == "WARN"
    assert found(collector) == set()


@pytest.mark.parametrize(("ranks", "expected"), [(1, set()), (2, {"tcp"})])
def test_gloo_speaks_tcp(ranks: int, expected: set[str]) -> None:
    collector = TransportCollector()
    collector.begin(1, "gloo", ranks)
    collector.after_step()
    assert found(collector) == expected


def test_rdma_devices_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_metrics, "RDMA_DEVICES", tmp_path)
    for name in ("uverbs0", "uverbs1", "rdma_cm", "umad0"):
        (tmp_path / name).touch()
    (family,) = (each for each in TransportCollector().collect() if each.name == "boost_rank_rdma_devices")
    assert [sample.value for sample in family.samples] == [2]
