"""A job's dashboards: how well and how fast it learns and what happened to it, and the ranks of its gang compared."""

from grafana_foundation_sdk.builders import common, dashboard, statushistory
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models.dashboard import FieldColorModeId

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    JOB,
    PROMETHEUS,
    TOOLTIP,
    WIDTH,
    Need,
    Query,
    Row,
    a_step,
    bars,
    count,
    counted,
    curves,
    frame,
    goodput,
    levels,
    newest,
    number,
    over_time,
    rate,
    share,
    stacked,
    stepped,
    time_series,
    total,
)

_BY = ("collective", "group")
_LEGEND = "{{collective}} {{group}}"

_STEP = rate("boost_rank_step_part_seconds_total", JOB)
_WHOLE = rate("boost_rank_communication_seconds_total", JOB)
_EXPOSED = rate("boost_rank_exposed_communication_seconds_total", JOB)

_BY_RANK = f"max by (gpu, rank) (boost_rank_gpu_memory_total_bytes{{{JOB}}}) > bool 0"
_COLUMNS, _ROWS = 100, 64  # Grafana draws no heat map that has more columns than fit
_SLOW = 1.5  # times as long as the others: where BoostRankSlow fires


def job() -> Dashboard:
    """One job: how well and how fast it learns, how its steps and its time are spent, and what happened to it."""
    # How the job stands now: two lines of numbers.
    step, target = newest("boost_job_step", JOB), newest("boost_job_target_steps", JOB)
    state = count("State", "What the job does.", "none", newest("boost_job_info", JOB, "state"), "{{state}}")
    pace = f"max(deriv(boost_job_step{{{JOB}}}[10m]))"
    good = number(
        "Goodput", "Share of the job's time, without waiting, that went into new steps.", "percentunit", goodput(JOB)
    )
    silence = number(
        "Last step",
        "Time since the newest step was done.",
        "s",
        f"time() - {newest('boost_job_progress_timestamp_seconds', JOB)}",
    ).decimals(0)
    age = number(
        "Last checkpoint", "Time since the newest checkpoint was committed.", "s",
        f"time() - {newest('boost_job_checkpoint_timestamp_seconds', JOB)}",
    )  # fmt: skip
    restarts = number(
        "Interruptions", "How often training resumed after an interruption.", "none",
        total(newest("boost_job_restarts_total", JOB, "cause")),
    )  # fmt: skip
    attempts = number("Gangs", "Gangs started for the job.", "none", newest("boost_job_attempts_total", JOB))
    now = [
        state.no_value("ended").text_mode(looks.BigValueTextMode.NAME),
        number("Done", "Share of the job's steps that are done.", "percentunit", f"{step} / {target}").max(1),
        number("Steps", "Optimizer steps done.", "locale", step),
        number(
            "Time left",
            "Time until the last step, at the pace of the last ten minutes.",
            "s",
            f"({target} - {step}) / ({pace} > 0)",
        ),
        number("Loss now", "Training loss of the newest step.", "suffix: nats", newest("boost_job_loss_nats", JOB)),
        number("Speed", "Tokens trained on per second.", "si:tokens/s", newest("boost_job_tokens_per_second", JOB)),
        good.max(1).thresholds(levels("red", (0.5, "yellow"), (0.7, "green"))),
        silence.thresholds(levels("text", (120, "yellow"), (600, "red"))),
        age.decimals(0).thresholds(levels("text", (3600, "yellow"), (7200, "red"))),
        restarts.thresholds(levels("text", (1, "yellow"), (3, "red"))),
        attempts,
        number("Workers", "Ranks that train.", "none", newest("boost_job_workers", JOB)),
    ]

    loss = curves(
        "Loss", "Training loss of the newest step, and loss on validation text, in nats per token.", "suffix: nats",
        _of_job("boost_job_loss_nats", "training"), _of_job("boost_job_validation_loss_nats", "validation"),
    )  # fmt: skip
    norm = time_series(
        "Gradient norm", "Norm of the whole gradient before clipping.", "none",
        _of_job("boost_job_gradient_norm", "norm"),
    )  # fmt: skip
    learning_rate = time_series(
        "Learning rate", "Learning rate of the newest step.", "sci", _of_job("boost_job_learning_rate", "rate")
    )

    tokens = time_series(
        "Tokens", "Tokens trained on per second, as reported by the newest step, and as the total grows.",
        "si:tokens/s", _of_job("boost_job_tokens_per_second", "newest step"),
        Query(f"clamp_min(max(deriv(boost_job_tokens{{{JOB}}}[$__rate_interval])), 0)", "over time"),
    )  # fmt: skip
    tokens_of_a_worker = time_series(
        "Tokens of a worker", "Tokens trained on per second by each worker, which elasticity should not change.",
        "si:tokens/s", _of_job("boost_job_tokens_per_second_per_worker", "a worker"),
    )  # fmt: skip
    samples = time_series(
        "Samples", "Sequences trained on per second.", "suffix: samples/s",
        _of_job("boost_job_samples_per_second", "newest step"),
    )  # fmt: skip
    layout = time_series(
        "Layout", "Number of ranks that train, and their layout.", "none", _of_job("boost_job_workers", "workers"),
        _of_job("boost_job_tensor_parallel_size", "tensor parallel"),
        _of_job("boost_job_pipeline_parallel_size", "pipeline parallel"),
        _of_job("boost_job_context_parallel_size", "context parallel"),
        _of_job("boost_job_data_parallel_size", "data parallel"),
    )  # fmt: skip
    parts = time_series(
        "Parts of a step", "How a step's time is spent, averaged over the ranks.", "s",
        Query(a_step("boost_rank_step_part_seconds_total", JOB, "part"), "{{part}}"),
    )  # fmt: skip
    whole = time_series(
        "Step", "Duration of the newest step, and the parts spent waiting for data and for collectives.", "s",
        _of_job("boost_job_step_seconds", "step"), _of_job("boost_job_data_seconds", "data"),
        _of_job("boost_job_exposed_communication_seconds", "exposed communication"),
    )  # fmt: skip
    utilization = time_series(
        "FLOPs utilization", "FLOPs of the model, and also of recomputation, as shares of the devices' peak.",
        "percentunit", _of_job("boost_job_model_flops_utilization_ratio", "model"),
        _of_job("boost_job_hardware_flops_utilization_ratio", "hardware"),
    )  # fmt: skip
    flops = time_series(
        "Model FLOPs", "Model FLOPs per second of the whole gang.", "flops",
        _of_job("boost_job_model_flops_per_second", "model"),
    )  # fmt: skip
    seconds = time_series(
        "Step time and prediction", "The median of the newest steps, and what the plan predicted for the layout.", "s",
        _of_job("boost_job_median_step_seconds", "measured"), _of_job("boost_job_predicted_step_seconds", "predicted"),
    )  # fmt: skip
    memory = time_series(
        "Memory and prediction",
        "The peak memory up to the gang's second step, on the rank with the highest peak, and the plan's prediction "
        "for that rank.",
        "bytes",
        _of_job("boost_job_peak_memory_bytes", "measured"),
        _of_job("boost_job_planned_memory_bytes", "planned"),
    )
    imbalance = time_series(
        "Imbalance of long context",
        "Attention of each micro-batch's most loaded context parallel rank over the mean, by the newest step's plans.",
        "none", _of_job("boost_job_context_imbalance_ratio", "largest over mean"),
    )  # fmt: skip
    speed = [
        tokens,
        tokens_of_a_worker,
        samples,
        stepped(layout),
        stacked(parts),
        whole,
        utilization.max(1).no_value(Need.PEAK),
        flops,
    ]
    predicted = [seconds, memory, imbalance.no_value(Need.CONTEXT)]

    # Communication between the ranks: how long, how much, and which part training waits for.
    sent = rate("boost_rank_communication_bytes_total", JOB, *_BY)
    bandwidth = share(sent, rate("boost_rank_communication_seconds_total", JOB, *_BY), *_BY)
    shares = time_series(
        "Share of the step",
        "Communication that training waits for, and the hidden part, as shares of the step's time.", "percentunit",
        Query(f"{_EXPOSED} / {_STEP}", "exposed"), Query(f"clamp_min({_WHOLE} - {_EXPOSED}, 0) / {_STEP}", "hidden"),
    )  # fmt: skip
    seconds = time_series(
        "Seconds by collective",
        "Duration of a step's collectives on a rank, from start to end, including hidden ones.", "s",
        Query(a_step("boost_rank_communication_seconds_total", JOB, *_BY), _LEGEND),
    )  # fmt: skip
    exposed = time_series(
        "Waited for by collective", "Time that a rank waits for the collectives of a step.", "s",
        Query(a_step("boost_rank_exposed_communication_seconds_total", JOB, *_BY), _LEGEND),
    )  # fmt: skip
    volume = time_series(
        "Bytes by collective", "Payload of a step's collectives on a rank.", "bytes",
        Query(a_step("boost_rank_communication_bytes_total", JOB, *_BY), _LEGEND),
    )  # fmt: skip
    achieved = time_series(
        "Bandwidth by collective", "Payload divided by the duration of the collectives.", "binBps",
        Query(bandwidth, _LEGEND),
    )  # fmt: skip
    calls = time_series(
        "Calls by collective", "Collectives that a rank starts in a step.", "none",
        Query(a_step("boost_rank_communication_calls_total", JOB, *_BY), _LEGEND),
    )  # fmt: skip
    communication = [stacked(shares), stacked(seconds), stacked(exposed), stacked(volume), achieved, calls]

    kinds = newest("boost_job_goodput_seconds", JOB, "kind")
    spent = bars(
        "Where the time went", "How the job's time so far was spent.", "s", Query(f"sort_desc({kinds})", "{{kind}}")
    )
    recent = time_series(
        "Goodput of the last hour",
        "Share of the last hour, without waiting, that went into new steps; what BoostGoodputLow is based on.",
        "percentunit",
        _of_job("job:boost_job_goodput:ratio1h", "goodput"),
    ).max(1)
    interruptions = time_series(
        "Restarts", "How often training resumed after each kind of interruption.", "none",
        _of_job("boost_job_restarts_total", "{{cause}}", "cause"),
    )  # fmt: skip
    faults = time_series(
        "Faults", "How often a hang, a slow rank, a divergence or a failing store was detected.", "none",
        _of_job("boost_job_faults_total", "{{what}}", "what"),
    )  # fmt: skip

    rows = [
        Row("Now", now),
        Row("Learning", [loss, norm, learning_rate]),
        Row("Speed", [*(panel.span(6) for panel in speed), *(panel.span(8) for panel in predicted)]),
        Row("Communication", communication),
        Row(
            "Time",
            [
                panel.span(6)
                for panel in (spent, recent.no_value(Need.HALF_AN_HOUR), stepped(interruptions), stepped(faults))
            ],
        ),
    ]
    says = "One training job, from its loss to how its time was spent."
    board = frame("boost-job", "Boost / Job", says, rows, ["tenant", "job_name", "job_id"])
    board = board.annotation(panels.restarts(JOB)).annotation(panels.layouts(JOB))
    return board.link(panels.to_dashboard("Ranks", "boost-ranks")).link(panels.to_service("/jobs/${job_id}"))


def _of_job(metric: str, legend: str, *by: str) -> Query:
    return Query(newest(metric, JOB, *by), legend)


def ranks() -> Dashboard:
    """The ranks of one job's gang: which of them is slow, and the state of its process and its GPU."""
    # Seconds of a step: without waiting for others, waiting for them, and waiting for data.
    steps = rate("boost_rank_steps_total", JOB, "rank")
    own, exposed, data = (
        share(rate("boost_rank_step_part_seconds_total", f"{JOB}, part{parts}", "rank"), steps, "rank")
        for parts in ('!="exposed_communication"', '="exposed_communication"', '="data"')
    )

    # A row of cells for each rank, whose colour goes from blue at 1 to red where BoostRankSlow fires.
    slow = statushistory.Panel().title("Against the others").datasource(PROMETHEUS)
    slow = slow.description(
        "A rank's own time in a step, as a multiple of that of the faster ranks of its stage; red is slow."
    )
    slow = slow.unit("suffix: ×").min(1).max(_SLOW).height(10).span(WIDTH).show_value(looks.VisibilityMode.NEVER)
    slow = slow.max_data_points(_COLUMNS).per_page(_ROWS)
    colours = dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_YL_RD)
    slow = slow.color_scheme(colours).legend(common.VizLegendOptions().show_legend(False)).tooltip(TOOLTIP)
    slow = slow.targets(over_time([Query(f"rank:boost_rank_busy_seconds:ratio5m{{{JOB}}}", "rank {{rank}}")]))
    own_time = time_series(
        "Own time in a step",
        "A rank's time in a step minus its waiting for collectives; a rank above the others holds them up.", "s",
        Query(own, "rank {{rank}}"),
    )  # fmt: skip
    rates = time_series(
        "Steps", "Optimizer steps per second of each rank, which must agree.", "suffix: steps/s",
        Query(steps, "rank {{rank}}"),
    )  # fmt: skip

    waits = time_series(
        "Exposed communication", "Time that a rank waits for collectives in a step; the slow rank waits least.", "s",
        Query(exposed, "rank {{rank}}"),
    )  # fmt: skip
    groups = time_series(
        "Exposed communication by group", "Mean time that the ranks wait for each kind of neighbour in a step.", "s",
        Query(a_step("boost_rank_exposed_communication_seconds_total", JOB, "group"), "{{group}}"),
    )  # fmt: skip
    batches = time_series(
        "Waiting for data", "Time that a rank waits for its batch in a step.", "s", Query(data, "rank {{rank}}")
    )

    memory = time_series(
        "Process memory", "Host memory that a rank's process holds.", "bytes",
        Query(f'max by (rank) (process_resident_memory_bytes{{job="boost-ranks", {JOB}}})', "rank {{rank}}"),
    )  # fmt: skip
    cpu = time_series(
        "CPU", "Number of cores that a rank's process keeps busy.", "suffix: cores",
        Query(rate("process_cpu_seconds_total", f'job="boost-ranks", {JOB}', "rank"), "rank {{rank}}"),
    )  # fmt: skip
    transport = time_series(
        "Transport", "Number of ranks that use each transport, as chosen by NCCL in the gang's first step.", "none",
        Query(f"count by (transport) (boost_gang_transport{{{JOB}}})", "{{transport}}"),
    )  # fmt: skip

    utilization, used, power, heat = (
        time_series(title, says, unit, Query(f"max by (rank, gpu) ({value})", "rank {{rank}}")).no_value(Need.GPU)
        for title, says, unit, value in (
            (
                "GPU utilization",
                "Share of time in which a kernel ran.",
                "percentunit",
                f"boost_rank_gpu_utilization_ratio{{{JOB}}}",
            ),
            (
                "GPU memory",
                "Memory in use, as a share of the GPU's memory.",
                "percentunit",
                f"boost_rank_gpu_memory_used_bytes{{{JOB}}} / boost_rank_gpu_memory_total_bytes{{{JOB}}}",
            ),
            ("GPU power", "What each GPU draws.", "watt", f"boost_rank_gpu_power_watts{{{JOB}}}"),
            ("GPU temperature", "How hot each GPU is.", "celsius", f"boost_rank_gpu_temperature_celsius{{{JOB}}}"),
        )
    )

    # What DCGM knows of a gang's GPUs and NVML does not tell: how hard they work, what slows or breaks them. The
    # exporter names a GPU by its UUID, as the ranks do.
    tensor, clock, nvlink, slowed, xid, errors = (
        time_series(
            title,
            says,
            unit,
            Query(
                f'max by (rank, gpu) (label_join(max by (UUID) ({value}), "gpu", "", "UUID") '
                f"* on (gpu) group_left (rank) ({_BY_RANK}))",
                "rank {{rank}}",
            ),
        ).no_value(Need.DCGM)
        for title, says, unit, value in (
            (
                "Tensor cores",
                "Share of cycles in which the tensor cores were active.",
                "percentunit",
                "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            ),
            (
                "SM clock",
                "Clock of the multiprocessors; a GPU below the others is throttled.",
                "hertz",
                "DCGM_FI_DEV_SM_CLOCK * 1e6",
            ),
            (
                "NVLink",
                "Traffic over all NVLinks of a GPU, both ways, in the exporter's unit.",
                "suffix: /s",
                "rate(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL[$__rate_interval])",
            ),
            (
                "Throttling",
                "Share of time in which heat or the power limit reduced the clock.",
                "percentunit",
                "(rate(DCGM_FI_DEV_THERMAL_VIOLATION[$__rate_interval]) + "
                "rate(DCGM_FI_DEV_POWER_VIOLATION[$__rate_interval])) / 1e9",
            ),
            ("XID", "Number of the newest error that the driver has reported.", "none", "DCGM_FI_DEV_XID_ERRORS > 0"),
            (
                "ECC errors",
                "Memory errors detected, including corrected ones.",
                "none",
                "increase(DCGM_FI_DEV_ECC_SBE_VOL_TOTAL[$__rate_interval]) + "
                "increase(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[$__rate_interval])",
            ),
        )
    )

    rows = [
        Row("Pace", [slow, own_time.span(12), rates.span(12)]),
        Row("Waiting", [waits, stacked(groups), batches]),
        Row("Processes", [memory, cpu, stepped(transport)]),
        Row("GPUs", [panel.span(WIDTH // 4) for panel in (utilization.max(1), used.max(1), power, heat)]),
        Row("GPUs by DCGM", [tensor.max(1), clock, nvlink, slowed.max(1), stepped(xid), counted(errors)]),
    ]
    says = "The ranks of a job's gang compared: steps, waiting, memory and GPUs."
    board = frame("boost-ranks", "Boost / Ranks", says, rows, ["tenant", "job_name", "job_id"])
    board = board.annotation(panels.restarts(JOB)).annotation(panels.layouts(JOB))
    return board.link(panels.to_dashboard("Job", "boost-job")).link(panels.to_service("/jobs/${job_id}"))
