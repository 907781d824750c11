"""The ranks of one job's gang: which of them is slow, and the state of its process and its GPU."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source import annotations, links, ranks_gpus, variables
from deploy.grafana.source.bands import heat
from deploy.grafana.source.frame import Row, frame
from deploy.grafana.source.graphs import stacked, stepped, time_series
from deploy.grafana.source.panels import WIDTH, Need, Query
from deploy.grafana.source.promql import JOB, a_step, rate, share

_STEPS = rate("boost_rank_steps_total", JOB, "rank")
_PARTS = "boost_rank_step_part_seconds_total"
_SLOW = 1.5  # times as long as the others: where BoostRankSlow fires


def ranks() -> Dashboard:
    """The dashboard."""
    says = "The ranks of a job's gang compared: steps, waiting, memory and GPUs."
    board = frame("boost-ranks", "Boost / Ranks", says, [_pace(), _waiting(), _processes(), _gpus(), ranks_gpus.row()])
    board = board.with_variable(variables.tenants()).with_variable(variables.job_names())
    board = board.with_variable(variables.job_id())
    board = board.annotation(annotations.restarts(JOB)).annotation(annotations.layouts(JOB))
    return board.link(links.to_dashboard("Job", "boost-job")).link(links.to_service("/jobs/${job_id}"))


def _pace() -> Row:
    slow = heat(
        "Against the others",
        "A rank's own time in a step, as a multiple of that of the faster ranks of its stage; red is slow.",
        "suffix: ×",
        Query(f"rank:boost_rank_busy_seconds:ratio5m{{{JOB}}}", "rank {{rank}}"),
        low=1,
        high=_SLOW,
    )
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
