"""The ranks of one job's gang: which of them is slow, and the state of its process and its GPU."""

from grafana_foundation_sdk.builders import common, dashboard, statushistory, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import FieldColorModeId

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    JOB,
    PROMETHEUS,
    WIDTH,
    Need,
    Query,
    Row,
    a_step,
    counted,
    frame,
    over_time,
    rate,
    share,
    stacked,
    stepped,
    time_series,
    tooltip,
)

_BY_RANK = f"max by (gpu, rank) (boost_rank_gpu_memory_total_bytes{{{JOB}}}) > bool 0"
_COLUMNS, _ROWS = 100, 64  # Grafana draws no heat map that has more columns than fit
_STEPS = rate("boost_rank_steps_total", JOB, "rank")
_PARTS = "boost_rank_step_part_seconds_total"
_SLOW = 1.5  # times as long as the others: where BoostRankSlow fires


def ranks() -> Dashboard:
    """The dashboard."""
    says = "The ranks of a job's gang compared: steps, waiting, memory and GPUs."
    board = frame(
        "boost-ranks",
        "Boost / Ranks",
        says,
        [_pace(), _waiting(), _processes(), _gpus(), _dcgm()],
        ["tenant", "job_name", "job_id"],
    )
    board = board.annotation(panels.restarts(JOB)).annotation(panels.layouts(JOB))
    return board.link(panels.to_dashboard("Job", "boost-job")).link(panels.to_service("/jobs/${job_id}"))


def _pace() -> Row:
    # A row of cells for each rank, whose colour goes from blue at 1 to red where BoostRankSlow fires.
    slow = statushistory.Panel().title("Against the others").datasource(PROMETHEUS)
    slow = slow.description(
        "A rank's own time in a step, as a multiple of that of the faster ranks of its stage; red is slow."
    )
    slow = slow.unit("suffix: ×").min(1).max(_SLOW).height(10).span(WIDTH).show_value(looks.VisibilityMode.NEVER)
    slow = slow.max_data_points(_COLUMNS).per_page(_ROWS)
    colours = dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD)
    slow = slow.color_scheme(colours).legend(common.VizLegendOptions().show_legend(False)).tooltip(tooltip())
    slow = slow.targets(over_time([Query(f"rank:boost_rank_busy_seconds:ratio5m{{{JOB}}}", "rank {{rank}}")]))
    own = time_series(
        "Own time in a step",
        "A rank's time in a step minus its waiting for collectives; a rank above the others holds them up.",
        "s",
        Query(_of_a_step(_PARTS, f'{JOB}, part!="exposed_communication"'), "rank {{rank}}"),
    )
    steps = time_series(
        "Steps",
        "Optimizer steps per second of each rank, which must agree.",
        "suffix: steps/s",
        Query(_STEPS, "rank {{rank}}"),
    )
    return Row("Pace", [slow, own.span(12), steps.span(12)])


def _waiting() -> Row:
    waits = time_series(
        "Exposed communication",
        "Time that a rank waits for collectives in a step; the slow rank waits least.",
        "s",
        Query(_of_a_step(_PARTS, f'{JOB}, part="exposed_communication"'), "rank {{rank}}"),
    )
    groups = time_series(
        "Exposed communication by group",
        "Mean time that the ranks wait for each kind of neighbour in a step.",
        "s",
        Query(a_step("boost_rank_exposed_communication_seconds_total", JOB, "group"), "{{group}}"),
    )
    data = time_series(
        "Waiting for data",
        "Time that a rank waits for its batch in a step.",
        "s",
        Query(_of_a_step(_PARTS, f'{JOB}, part="data"'), "rank {{rank}}"),
    )
    return Row("Waiting", [waits, stacked(groups), data])


def _processes() -> Row:
    memory = time_series(
        "Process memory",
        "Host memory that a rank's process holds.",
        "bytes",
        Query(f'max by (rank) (process_resident_memory_bytes{{job="boost-ranks", {JOB}}})', "rank {{rank}}"),
    )
    cpu = time_series(
        "CPU",
        "Number of cores that a rank's process keeps busy.",
        "suffix: cores",
        Query(rate("process_cpu_seconds_total", f'job="boost-ranks", {JOB}', "rank"), "rank {{rank}}"),
    )
    transport = time_series(
        "Transport",
        "Number of ranks that use each transport, as chosen by NCCL in the gang's first step.",
        "none",
        Query(f"count by (transport) (boost_gang_transport{{{JOB}}})", "{{transport}}"),
    )
    return Row("Processes", [memory, cpu, stepped(transport)])


def _gpus() -> Row:
    memory = _gpu(
        "GPU memory",
        "Memory in use, as a share of the GPU's memory.",
        "percentunit",
        f"boost_rank_gpu_memory_used_bytes{{{JOB}}} / boost_rank_gpu_memory_total_bytes{{{JOB}}}",
    )
    utilization = _gpu(
        "GPU utilization",
        "Share of time in which a kernel ran.",
        "percentunit",
        f"boost_rank_gpu_utilization_ratio{{{JOB}}}",
    )
    power = _gpu("GPU power", "What each GPU draws.", "watt", f"boost_rank_gpu_power_watts{{{JOB}}}")
    heat = _gpu("GPU temperature", "How hot each GPU is.", "celsius", f"boost_rank_gpu_temperature_celsius{{{JOB}}}")
    return Row("GPUs", [panel.span(WIDTH // 4) for panel in (utilization.max(1), memory.max(1), power, heat)])


def _gpu(title: str, says: str, unit: str, value: str) -> timeseries.Panel:
    query = Query(f"max by (rank, gpu) ({value})", "rank {{rank}}")
    return time_series(title, says, unit, query).no_value(Need.GPU)


def _of_a_step(metric: str, where: str) -> str:
    return share(rate(metric, where, "rank"), _STEPS, "rank")


def _dcgm() -> Row:
    """What DCGM knows of a gang's GPUs and NVML does not tell: how hard they work, what slows or breaks them."""
    tensor = _gpu_series(
        "Tensor cores",
        "Share of cycles in which the tensor cores were active.",
        "percentunit",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    )
    clock = _gpu_series(
        "SM clock",
        "Clock of the multiprocessors; a GPU below the others is throttled.",
        "hertz",
        "DCGM_FI_DEV_SM_CLOCK * 1e6",
    )
    nvlink = _gpu_series(
        "NVLink",
        "Traffic over all NVLinks of a GPU, both ways, in the exporter's unit.",
        "suffix: /s",
        _rate("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"),
    )
    slowed = _gpu_series(
        "Throttling",
        "Share of time in which heat or the power limit reduced the clock.",
        "percentunit",
        f"({_rate('DCGM_FI_DEV_THERMAL_VIOLATION')} + {_rate('DCGM_FI_DEV_POWER_VIOLATION')}) / 1e9",
    )
    xid = _gpu_series(
        "XID", "Number of the newest error that the driver has reported.", "none", "DCGM_FI_DEV_XID_ERRORS > 0"
    )
    errors = _gpu_series(
        "ECC errors",
        "Memory errors detected, including corrected ones.",
        "none",
        "increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL[$__rate_interval]) + "
        "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[$__rate_interval])",
    )
    return Row("GPUs by DCGM", [tensor.max(1), clock, nvlink, slowed.max(1), stepped(xid), counted(errors)])


def _rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


def _gpu_series(title: str, says: str, unit: str, value: str) -> timeseries.Panel:
    """A value of each GPU that the job's ranks have: the exporter names it by its UUID, as the ranks do."""
    named = f'label_join(max by (UUID) ({value}), "gpu", "", "UUID")'
    query = Query(f"max by (rank, gpu) ({named} * on (gpu) group_left (rank) ({_BY_RANK}))", "rank {{rank}}")
    return time_series(title, says, unit, query).no_value(Need.DCGM)
