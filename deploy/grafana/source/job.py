"""A job's dashboards: how well and how fast it learns and what happened to it, and the ranks of its gang compared."""

from grafana_foundation_sdk.builders import common, dashboard, statushistory
from grafana_foundation_sdk.builders.dashboard import Dashboard, DashboardLink
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import DashboardLinkType, FieldColorModeId

from deploy.grafana.source import panels
from deploy.grafana.source.panels import JOB, Need, Row, a_step, newest, number, plot, rate, share, total

_BY = ("collective", "group")
_LEGEND = "{{collective}} {{group}}"

_STEP = rate("boost_rank_step_part_seconds_total", JOB)
_WHOLE = rate("boost_rank_communication_seconds_total", JOB)
_EXPOSED = rate("boost_rank_exposed_communication_seconds_total", JOB)

_BY_RANK = f"max by (gpu, rank) (boost_rank_gpu_memory_total_bytes{{{JOB}}}) > bool 0"
_AXES = ("tensor", "pipeline", "context", "data")
_LAYOUT = {"workers": "workers", **{f"{axis}_parallel_size": f"{axis} parallel" for axis in _AXES}}  # by metric
_COLUMNS, _ROWS = 100, 64  # Grafana draws no heat map that has more columns than fit
_SLOW = 1.5  # times as long as the others: where BoostRankSlow fires


def job() -> Dashboard:
    """One job: how well and how fast it learns, how its steps and its time are spent, and what happened to it."""
    # How the job stands now: two lines of numbers.
    step, target = _job("step"), _job("target_steps")
    left = f"({target} - {step}) / (max(deriv(boost_job_step{{{JOB}}}[10m])) > 0)"
    silent, unsaved = (f"time() - {_job(f'{what}_timestamp_seconds')}" for what in ("progress", "checkpoint"))
    restarts = total(_job("restarts_total", "cause"))
    of_time = "Share of the job's time, without waiting, that went into new steps."
    now = [
        panels.count("State", "What the job does.", _job("info", "state"), legend="{{state}}")
        .no_value("ended")
        .text_mode(looks.BigValueTextMode.NAME),
        number("Done", "Share of the job's steps that are done.", f"{step} / {target}", "percentunit").max(1),
        number("Steps", "Optimizer steps done.", step, "locale"),
        number("Time left", "Time until the last step, at the pace of the last ten minutes.", left, "s"),
        number("Loss now", "Training loss of the newest step.", _job("loss_nats"), "suffix: nats"),
        number("Speed", "Tokens trained on per second.", _job("tokens_per_second"), "si:tokens/s"),
        number("Goodput", of_time, panels.goodput(JOB), "percentunit").max(1).levels("red", yellow=0.5, green=0.7),
        number("Last step", "Time since the newest step was done.", silent, "s")
        .decimals(0)
        .levels(yellow=120, red=600),
        number("Last checkpoint", "Time since the newest checkpoint was committed.", unsaved, "s")
        .decimals(0)
        .levels(yellow=3600, red=7200),
        number("Interruptions", "How often training resumed after an interruption.", restarts).levels(yellow=1, red=3),
        number("Gangs", "Gangs started for the job.", _job("attempts_total")),
        number("Workers", "Ranks that train.", _job("workers")),
    ]

    says = "Training loss of the newest step, and loss on validation text, in nats per token."
    learning = [
        plot("Loss", says, "suffix: nats", from_zero=False)
        .of(_job("loss_nats"), "training")
        .of(_job("validation_loss_nats"), "validation"),
        plot("Gradient norm", "Norm of the whole gradient before clipping.").of(_job("gradient_norm"), "norm"),
        plot("Learning rate", "Learning rate of the newest step.", "sci").of(_job("learning_rate"), "rate"),
    ]

    layout = plot("Layout", "Number of ranks that train, and their layout.")
    for metric, axis in _LAYOUT.items():
        layout.of(_job(metric), axis)
    growing = f"clamp_min(max(deriv(boost_job_tokens{{{JOB}}}[$__rate_interval])), 0)"
    tokens = "Tokens trained on per second, as reported by the newest step, and as the total grows."
    of_a_worker = "Tokens trained on per second by each worker, which elasticity should not change."
    flops = "FLOPs of the model, and also of recomputation, as shares of the devices' peak."
    speed = [
        plot("Tokens", tokens, "si:tokens/s").of(_job("tokens_per_second"), "newest step").of(growing, "over time"),
        plot("Tokens of a worker", of_a_worker, "si:tokens/s").of(_job("tokens_per_second_per_worker"), "a worker"),
        plot("Samples", "Sequences trained on per second.", "suffix: samples/s").of(
            _job("samples_per_second"), "newest step"
        ),
        layout.stepped(),
        plot("Parts of a step", "How a step's time is spent, averaged over the ranks.", "s")
        .of(a_step("boost_rank_step_part_seconds_total", JOB, "part"), "{{part}}")
        .stacked(),
        plot("Step", "Duration of the newest step, and the parts spent waiting for data and for collectives.", "s")
        .of(_job("step_seconds"), "step")
        .of(_job("data_seconds"), "data")
        .of(_job("exposed_communication_seconds"), "exposed communication"),
        plot("FLOPs utilization", flops, "percentunit", Need.PEAK)
        .of(_job("model_flops_utilization_ratio"), "model")
        .of(_job("hardware_flops_utilization_ratio"), "hardware")
        .max(1),
        plot("Model FLOPs", "Model FLOPs per second of the whole gang.", "flops").of(
            _job("model_flops_per_second"), "model"
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
        plot("Step time and prediction", seconds, "s")
        .of(_job("median_step_seconds"), "measured")
        .of(_job("predicted_step_seconds"), "predicted"),
        plot("Memory and prediction", memory, "bytes")
        .of(_job("peak_memory_bytes"), "measured")
        .of(_job("planned_memory_bytes"), "planned"),
        plot("Imbalance of long context", imbalance, need=Need.CONTEXT).of(
            _job("context_imbalance_ratio"), "largest over mean"
        ),
    ]

    # Communication between the ranks: how long, how much, and which part training waits for.
    sent, taken = (rate(f"boost_rank_communication_{what}_total", JOB, *_BY) for what in ("bytes", "seconds"))
    shares = "Communication that training waits for, and the hidden part, as shares of the step's time."
    seconds = "Duration of a step's collectives on a rank, from start to end, including hidden ones."
    bandwidth = "Payload divided by the duration of the collectives."
    communication = [
        plot("Share of the step", shares, "percentunit")
        .of(f"{_EXPOSED} / {_STEP}", "exposed")
        .of(f"clamp_min({_WHOLE} - {_EXPOSED}, 0) / {_STEP}", "hidden")
        .stacked(),
        plot("Seconds by collective", seconds, "s")
        .of(a_step("boost_rank_communication_seconds_total", JOB, *_BY), _LEGEND)
        .stacked(),
        plot("Waited for by collective", "Time that a rank waits for the collectives of a step.", "s")
        .of(a_step("boost_rank_exposed_communication_seconds_total", JOB, *_BY), _LEGEND)
        .stacked(),
        plot("Bytes by collective", "Payload of a step's collectives on a rank.", "bytes")
        .of(a_step("boost_rank_communication_bytes_total", JOB, *_BY), _LEGEND)
        .stacked(),
        plot("Bandwidth by collective", bandwidth, "binBps").of(share(sent, taken, *_BY), _LEGEND),
        plot("Calls by collective", "Collectives that a rank starts in a step.").of(
            a_step("boost_rank_communication_calls_total", JOB, *_BY), _LEGEND
        ),
    ]

    spent = _job("goodput_seconds", "kind")
    recent = "Share of the last hour, without waiting, that went into new steps; what BoostGoodputLow is based on."
    time = [
        panels.bars("Where the time went", "How the job's time so far was spent.", "s", spent, "{{kind}}"),
        plot("Goodput of the last hour", recent, "percentunit", Need.HALF_AN_HOUR)
        .of(newest("job:boost_job_goodput:ratio1h", JOB), "goodput")
        .max(1),
        plot("Restarts", "How often training resumed after each kind of interruption.")
        .of(_job("restarts_total", "cause"), "{{cause}}")
        .stepped(),
        plot("Faults", "How often a hang, a slow rank, a divergence or a failing store was detected.")
        .of(_job("faults_total", "what"), "{{what}}")
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


def _job(metric: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", JOB, *by)


def _of_one_job(title: str, other: str, says: str, rows: list[Row]) -> Dashboard:
    """A dashboard on which one job is chosen, with a link to the job's other one."""
    board = panels.frame(title, says, rows, ["tenant", "job_name", "job_id"])
    changes = []  # one mark a change of the job's workers or of an axis of its layout, with the new size
    for metric, axis in _LAYOUT.items():
        before = newest(f"boost_job_{metric}", JOB, "job_name", offset=panels.EARLIER)
        counted = f'count_values by (job_name) ("size", {_job(metric, "job_name")} != {before})'
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
        plot("Own time in a step", says, "s").of(own, "rank {{rank}}").span(12),
        plot("Steps", "Optimizer steps per second of each rank, which must agree.", "suffix: steps/s")
        .of(steps, "rank {{rank}}")
        .span(12),
    ]

    by_rank = "Time that a rank waits for collectives in a step; the slow rank waits least."
    by_group = "Mean time that the ranks wait for each kind of neighbour in a step."
    waiting = [
        plot("Exposed communication", by_rank, "s").of(exposed, "rank {{rank}}"),
        plot("Exposed communication by group", by_group, "s")
        .of(a_step("boost_rank_exposed_communication_seconds_total", JOB, "group"), "{{group}}")
        .stacked(),
        plot("Waiting for data", "Time that a rank waits for its batch in a step.", "s").of(data, "rank {{rank}}"),
    ]

    memory = f'max by (rank) (process_resident_memory_bytes{{job="boost-ranks", {JOB}}})'
    cpu = rate("process_cpu_seconds_total", f'job="boost-ranks", {JOB}', "rank")
    processes = [
        plot("Process memory", "Host memory that a rank's process holds.", "bytes").of(memory, "rank {{rank}}"),
        plot("CPU", "Number of cores that a rank's process keeps busy.", "suffix: cores").of(cpu, "rank {{rank}}"),
        plot("Transport", "Number of ranks that use each transport, as chosen by NCCL in the gang's first step.")
        .of(f"count by (transport) (boost_gang_transport{{{JOB}}})", "{{transport}}")
        .stepped(),
    ]

    names = "utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts", "temperature_celsius"
    utilization, used, whole, power, heat = (f"boost_rank_gpu_{name}{{{JOB}}}" for name in names)
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
    return plot(title, says, unit).of(f"max by (rank, gpu) ({value})", "rank {{rank}}")
