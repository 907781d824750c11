"""A job's dashboards: how well and how fast it learns and what happened to it, and the ranks of its gang compared."""

from grafana_foundation_sdk.builders import common, dashboard, statushistory
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, FieldColorModeId

from deploy.grafana.source import panels
from deploy.grafana.source.panels import JOB, Need, Row, a_step, newest, number, rate, share, time_series, total

_BY = ("collective", "group")
_LEGEND = "{{collective}} {{group}}"

_STEP = rate("boost_rank_step_part_seconds_total", JOB)
_WHOLE = rate("boost_rank_communication_seconds_total", JOB)
_EXPOSED = rate("boost_rank_exposed_communication_seconds_total", JOB)

_BY_RANK = f"max by (gpu, rank) (boost_rank_gpu_memory_total_bytes{{{JOB}}}) > bool 0"
_LAYOUT = {
    "boost_job_workers": "workers",
    "boost_job_tensor_parallel_size": "tensor parallel",
    "boost_job_pipeline_parallel_size": "pipeline parallel",
    "boost_job_context_parallel_size": "context parallel",
    "boost_job_data_parallel_size": "data parallel",
}
_COLUMNS, _ROWS = 100, 64  # Grafana draws no heat map that has more columns than fit
_SLOW = 1.5  # times as long as the others: where BoostRankSlow fires


def job() -> Dashboard:
    """One job: how well and how fast it learns, how its steps and its time are spent, and what happened to it."""
    # How the job stands now: two lines of numbers.
    step, target = _of_job("step"), _of_job("target_steps")
    left = f"({target} - {step}) / (max(deriv(boost_job_step{{{JOB}}}[10m])) > 0)"
    silence, unsaved = (f"time() - {_of_job(f'{what}_timestamp_seconds')}" for what in ("progress", "checkpoint"))
    restarts = total(_of_job("restarts_total", "cause"))
    now = [
        panels.count("State", "What the job does.", _of_job("info", "state"), legend="{{state}}")
        .no_value("ended")
        .text_mode(looks.BigValueTextMode.NAME),
        number("Done", "Share of the job's steps that are done.", f"{step} / {target}", "percentunit").max(1),
        number("Steps", "Optimizer steps done.", step, "locale"),
        number("Time left", "Time until the last step, at the pace of the last ten minutes.", left, "s"),
        number("Loss now", "Training loss of the newest step.", _of_job("loss_nats"), "suffix: nats"),
        number("Speed", "Tokens trained on per second.", _of_job("tokens_per_second"), "si:tokens/s"),
        number("Goodput", "Share of the job's time, without waiting, that went into new steps.", panels.goodput(JOB))
        .unit("percentunit")
        .max(1)
        .levels("red", (0.5, "yellow"), (0.7, "green")),
        number("Last step", "Time since the newest step was done.", silence, "s")
        .decimals(0)
        .levels("text", (120, "yellow"), (600, "red")),
        number("Last checkpoint", "Time since the newest checkpoint was committed.", unsaved, "s")
        .decimals(0)
        .levels("text", (3600, "yellow"), (7200, "red")),
        number("Interruptions", "How often training resumed after an interruption.", restarts).levels(
            "text", (1, "yellow"), (3, "red")
        ),
        number("Gangs", "Gangs started for the job.", _of_job("attempts_total")),
        number("Workers", "Ranks that train.", _of_job("workers")),
    ]

    says = "Training loss of the newest step, and loss on validation text, in nats per token."
    learning = [
        time_series("Loss", says, "suffix: nats", from_zero=False)
        .of(_of_job("loss_nats"), "training")
        .of(_of_job("validation_loss_nats"), "validation"),
        time_series("Gradient norm", "Norm of the whole gradient before clipping.").of(
            _of_job("gradient_norm"), "norm"
        ),
        time_series("Learning rate", "Learning rate of the newest step.", "sci").of(_of_job("learning_rate"), "rate"),
    ]

    layout = time_series("Layout", "Number of ranks that train, and their layout.").of(_of_job("workers"), "workers")
    for axis in ("tensor", "pipeline", "context", "data"):
        layout.of(_of_job(f"{axis}_parallel_size"), f"{axis} parallel")
    growing = f"clamp_min(max(deriv(boost_job_tokens{{{JOB}}}[$__rate_interval])), 0)"
    tokens = "Tokens trained on per second, as reported by the newest step, and as the total grows."
    tokens_of_a_worker = "Tokens trained on per second by each worker, which elasticity should not change."
    whole = "Duration of the newest step, and the parts spent waiting for data and for collectives."
    speed = [
        time_series("Tokens", tokens, "si:tokens/s")
        .of(_of_job("tokens_per_second"), "newest step")
        .of(growing, "over time"),
        time_series("Tokens of a worker", tokens_of_a_worker, "si:tokens/s").of(
            _of_job("tokens_per_second_per_worker"), "a worker"
        ),
        time_series("Samples", "Sequences trained on per second.", "suffix: samples/s").of(
            _of_job("samples_per_second"), "newest step"
        ),
        layout.stepped(),
        time_series("Parts of a step", "How a step's time is spent, averaged over the ranks.", "s")
        .of(a_step("boost_rank_step_part_seconds_total", JOB, "part"), "{{part}}")
        .stacked(),
        time_series("Step", whole, "s")
        .of(_of_job("step_seconds"), "step")
        .of(_of_job("data_seconds"), "data")
        .of(_of_job("exposed_communication_seconds"), "exposed communication"),
        time_series(
            "FLOPs utilization", "FLOPs of the model, and also of recomputation, as shares of the devices' peak."
        )
        .unit("percentunit")
        .of(_of_job("model_flops_utilization_ratio"), "model")
        .of(_of_job("hardware_flops_utilization_ratio"), "hardware")
        .max(1)
        .no_value(Need.PEAK),
        time_series("Model FLOPs", "Model FLOPs per second of the whole gang.", "flops").of(
            _of_job("model_flops_per_second"), "model"
        ),
    ]

    seconds = "The median of the newest steps, and what the plan predicted for the layout."
    memory = (
        "The peak memory up to the gang's second step, on the rank with the highest peak, and the plan's prediction "
        "for that rank."
    )
    imbalance = (
        "Attention of each micro-batch's most loaded context parallel rank over the mean, by the newest step's plans."
    )
    predicted = [
        time_series("Step time and prediction", seconds, "s")
        .of(_of_job("median_step_seconds"), "measured")
        .of(_of_job("predicted_step_seconds"), "predicted"),
        time_series("Memory and prediction", memory, "bytes")
        .of(_of_job("peak_memory_bytes"), "measured")
        .of(_of_job("planned_memory_bytes"), "planned"),
        time_series("Imbalance of long context", imbalance, need=Need.CONTEXT).of(
            _of_job("context_imbalance_ratio"), "largest over mean"
        ),
    ]

    # Communication between the ranks: how long, how much, and which part training waits for.
    sent, taken = (rate(f"boost_rank_communication_{what}_total", JOB, *_BY) for what in ("bytes", "seconds"))
    shares = "Communication that training waits for, and the hidden part, as shares of the step's time."
    seconds = "Duration of a step's collectives on a rank, from start to end, including hidden ones."
    communication = [
        time_series("Share of the step", shares, "percentunit")
        .of(f"{_EXPOSED} / {_STEP}", "exposed")
        .of(f"clamp_min({_WHOLE} - {_EXPOSED}, 0) / {_STEP}", "hidden")
        .stacked(),
        time_series("Seconds by collective", seconds, "s")
        .of(a_step("boost_rank_communication_seconds_total", JOB, *_BY), _LEGEND)
        .stacked(),
        time_series("Waited for by collective", "Time that a rank waits for the collectives of a step.", "s")
        .of(a_step("boost_rank_exposed_communication_seconds_total", JOB, *_BY), _LEGEND)
        .stacked(),
        time_series("Bytes by collective", "Payload of a step's collectives on a rank.", "bytes")
        .of(a_step("boost_rank_communication_bytes_total", JOB, *_BY), _LEGEND)
        .stacked(),
        time_series("Bandwidth by collective", "Payload divided by the duration of the collectives.", "binBps").of(
            share(sent, taken, *_BY), _LEGEND
        ),
        time_series("Calls by collective", "Collectives that a rank starts in a step.").of(
            a_step("boost_rank_communication_calls_total", JOB, *_BY), _LEGEND
        ),
    ]

    spent = _of_job("goodput_seconds", "kind")
    recent = "Share of the last hour, without waiting, that went into new steps; what BoostGoodputLow is based on."
    time = [
        panels.bars("Where the time went", "How the job's time so far was spent.", "s", spent, "{{kind}}"),
        time_series("Goodput of the last hour", recent, "percentunit", Need.HALF_AN_HOUR)
        .of(newest("job:boost_job_goodput:ratio1h", JOB), "goodput")
        .max(1),
        time_series("Restarts", "How often training resumed after each kind of interruption.")
        .of(_of_job("restarts_total", "cause"), "{{cause}}")
        .stepped(),
        time_series("Faults", "How often a hang, a slow rank, a divergence or a failing store was detected.")
        .of(_of_job("faults_total", "what"), "{{what}}")
        .stepped(),
    ]

    rows = [
        Row("Now", now),
        Row("Learning", learning),
        Row("Speed", [*(panel.span(6) for panel in speed), *predicted]),
        Row("Communication", communication),
        Row("Time", time, span=6),
    ]
    says = "One training job, from its loss to how its time was spent."
    return _of_one_job("Job", "Ranks", says, rows)


def _of_job(metric: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", JOB, *by)


def _of_one_job(title: str, other: str, says: str, rows: list[Row]) -> Dashboard:
    """A dashboard on which one job is chosen, with a link to the job's other one."""
    board = panels.frame(f"boost-{title.lower()}", f"Boost / {title}", says, rows, ["tenant", "job_name", "job_id"])
    changes = []  # one mark a change of the job's workers or of an axis of its layout, with the new size
    for metric, axis in _LAYOUT.items():
        changed = f"{newest(metric, JOB, 'job_name')} != {newest(metric, JOB, 'job_name', offset=panels.EARLIER)}"
        counted = f'count_values by (job_name) ("size", {changed})'
        changes.append(f'label_replace({counted}, "axis", "{axis}", "", "")')
    layouts = panels.marks("Layout", "semi-dark-blue", " or ".join(changes), "{{job_name}}: {{axis}} {{size}}")
    link = DashboardLink(other).type(DashboardLinkType.LINK).icon("dashboard").url(f"/d/boost-{other.lower()}")
    board = board.annotation(panels.restarts(JOB)).annotation(layouts).link(link.include_vars(True).keep_time(True))
    return board.link(panels.to_service("/jobs/${job_id}"))


def ranks() -> Dashboard:
    """The ranks of one job's gang: which of them is slow, and the state of its process and its GPU."""
    # Seconds of a step: without waiting for others, waiting for them, and waiting for data.
    steps = rate("boost_rank_steps_total", JOB, "rank")
    own, exposed, data = (
        share(rate("boost_rank_step_part_seconds_total", f"{JOB}, part{parts}", "rank"), steps, "rank")
        for parts in ('!="exposed_communication"', '="exposed_communication"', '="data"')
    )

    # A row of cells for each rank, whose colour goes from blue at 1 to red where BoostRankSlow fires.
    says = "A rank's own time in a step, as a multiple of that of the faster ranks of its stage; red is slow."
    slow = statushistory.Panel().title("Against the others").description(says).datasource(panels.PROMETHEUS)
    slow = slow.unit("suffix: ×").min(1).max(_SLOW).height(10).span(panels.WIDTH).show_value(looks.VisibilityMode.NEVER)
    slow = slow.max_data_points(_COLUMNS).per_page(_ROWS)
    colours = dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD)
    slow = slow.color_scheme(colours).legend(common.VizLegendOptions().show_legend(False)).tooltip(panels.TOOLTIP)
    slow = slow.with_target(panels.query(f"rank:boost_rank_busy_seconds:ratio5m{{{JOB}}}", "rank {{rank}}"))
    says = "A rank's time in a step minus its waiting for collectives; a rank above the others holds them up."
    pace = [
        slow,
        time_series("Own time in a step", says, "s").of(own, "rank {{rank}}").span(12),
        time_series("Steps", "Optimizer steps per second of each rank, which must agree.", "suffix: steps/s")
        .of(steps, "rank {{rank}}")
        .span(12),
    ]

    by_rank = "Time that a rank waits for collectives in a step; the slow rank waits least."
    by_group = "Mean time that the ranks wait for each kind of neighbour in a step."
    waiting = [
        time_series("Exposed communication", by_rank, "s").of(exposed, "rank {{rank}}"),
        time_series("Exposed communication by group", by_group, "s")
        .of(a_step("boost_rank_exposed_communication_seconds_total", JOB, "group"), "{{group}}")
        .stacked(),
        time_series("Waiting for data", "Time that a rank waits for its batch in a step.", "s").of(
            data, "rank {{rank}}"
        ),
    ]

    memory = f'max by (rank) (process_resident_memory_bytes{{job="boost-ranks", {JOB}}})'
    cpu = rate("process_cpu_seconds_total", f'job="boost-ranks", {JOB}', "rank")
    transport = "Number of ranks that use each transport, as chosen by NCCL in the gang's first step."
    processes = [
        time_series("Process memory", "Host memory that a rank's process holds.", "bytes").of(memory, "rank {{rank}}"),
        time_series("CPU", "Number of cores that a rank's process keeps busy.", "suffix: cores").of(
            cpu, "rank {{rank}}"
        ),
        time_series("Transport", transport)
        .of(f"count by (transport) (boost_gang_transport{{{JOB}}})", "{{transport}}")
        .stepped(),
    ]

    utilization, used, whole, power, heat = (
        f"boost_rank_gpu_{what}{{{JOB}}}"
        for what in (
            "utilization_ratio",
            "memory_used_bytes",
            "memory_total_bytes",
            "power_watts",
            "temperature_celsius",
        )
    )
    of_memory = "Memory in use, as a share of the GPU's memory."
    gpus = [
        _of_gpus("GPU utilization", "Share of time in which a kernel ran.", "percentunit", utilization).max(1),
        _of_gpus("GPU memory", of_memory, "percentunit", f"{used} / {whole}").max(1),
        _of_gpus("GPU power", "What each GPU draws.", "watt", power),
        _of_gpus("GPU temperature", "How hot each GPU is.", "celsius", heat),
    ]

    # What DCGM knows of a gang's GPUs and NVML does not tell: how hard they work, what slows or breaks them. The
    # exporter names a GPU by its UUID, as the ranks do.
    tensor, clock, nvlink, slowed, xid, errors = (
        f'label_join(max by (UUID) ({value}), "gpu", "", "UUID") * on (gpu) group_left (rank) ({_BY_RANK})'
        for value in (
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            "DCGM_FI_DEV_SM_CLOCK * 1e6",
            "rate(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL[$__rate_interval])",
            "(rate(DCGM_FI_DEV_THERMAL_VIOLATION[$__rate_interval]) + "
            "rate(DCGM_FI_DEV_POWER_VIOLATION[$__rate_interval])) / 1e9",
            "DCGM_FI_DEV_XID_ERRORS > 0",
            "increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL[$__rate_interval]) + "
            "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[$__rate_interval])",
        )
    )
    at_work = "Share of cycles in which the tensor cores were active."
    of_nvlink = "Traffic over all NVLinks of a GPU, both ways, in the exporter's unit."
    throttled = "Share of time in which heat or the power limit reduced the clock."
    by_dcgm = [
        _of_gpus("Tensor cores", at_work, "percentunit", tensor).max(1),
        _of_gpus("SM clock", "Clock of the multiprocessors; a GPU below the others is throttled.", "hertz", clock),
        _of_gpus("NVLink", of_nvlink, "suffix: /s", nvlink),
        _of_gpus("Throttling", throttled, "percentunit", slowed).max(1),
        _of_gpus("XID", "Number of the newest error that the driver has reported.", "none", xid).stepped(),
        _of_gpus("ECC errors", "Memory errors detected, including corrected ones.", "none", errors).counted(),
    ]

    rows = [
        Row("Pace", pace),
        Row("Waiting", waiting),
        Row("Processes", processes),
        Row("GPUs", [panel.no_value(Need.GPU) for panel in gpus], span=6),
        Row("GPUs by DCGM", [panel.no_value(Need.DCGM) for panel in by_dcgm]),
    ]
    says = "The ranks of a job's gang compared: steps, waiting, memory and GPUs."
    return _of_one_job("Ranks", "Job", says, rows)


def _of_gpus(title: str, says: str, unit: str, value: str) -> panels.Lines:
    return time_series(title, says, unit).of(f"max by (rank, gpu) ({value})", "rank {{rank}}")
