"""What DCGM knows of a gang's GPUs and NVML does not tell the ranks: how hard they work, what slows or breaks them."""

from grafana_foundation_sdk.builders import timeseries

from deploy.grafana.source.frame import Row
from deploy.grafana.source.graphs import counted, stepped, time_series
from deploy.grafana.source.panels import Need, Query
from deploy.grafana.source.promql import JOB

_BY_RANK = f"max by (gpu, rank) (boost_rank_gpu_memory_total_bytes{{{JOB}}}) > bool 0"


def row() -> Row:
    """GPUs as NVIDIA's DCGM exporter sees them."""
    tensor = _gpu(
        "Tensor cores",
        "Share of cycles in which the tensor cores were active.",
        "percentunit",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    )
    clock = _gpu(
        "SM clock",
        "Clock of the multiprocessors; a GPU below the others is throttled.",
        "hertz",
        "DCGM_FI_DEV_SM_CLOCK * 1e6",
    )
    nvlink = _gpu(
        "NVLink",
        "Traffic over all NVLinks of a GPU, both ways, in the exporter's unit.",
        "suffix: /s",
        _rate("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"),
    )
    slowed = _gpu(
        "Throttling",
        "Share of time in which heat or the power limit reduced the clock.",
        "percentunit",
        f"({_rate('DCGM_FI_DEV_THERMAL_VIOLATION')} + {_rate('DCGM_FI_DEV_POWER_VIOLATION')}) / 1e9",
    )
    xid = _gpu("XID", "Number of the newest error that the driver has reported.", "none", "DCGM_FI_DEV_XID_ERRORS > 0")
    errors = _gpu(
        "ECC errors",
        "Memory errors detected, including corrected ones.",
        "none",
        f"{_increase('DCGM_FI_DEV_ECC_SBE_VOL_TOTAL')} + {_increase('DCGM_FI_DEV_ECC_DBE_VOL_TOTAL')}",
    )
    return Row("GPUs by DCGM", [tensor.max(1), clock, nvlink, slowed.max(1), stepped(xid), counted(errors)])


def _rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


def _increase(metric: str) -> str:
    return f"increase({metric}[$__rate_interval])"


def _gpu(title: str, says: str, unit: str, value: str) -> timeseries.Panel:
    """A value of each GPU that the job's ranks have: the exporter names it by its UUID, as the ranks do."""
    named = f'label_join(max by (UUID) ({value}), "gpu", "", "UUID")'
    query = Query(f"max by (rank, gpu) ({named} * on (gpu) group_left (rank) ({_BY_RANK}))", "rank {{rank}}")
    return time_series(title, says, unit, query).no_value(Need.DCGM)
