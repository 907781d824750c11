"""One job: how well and how fast it learns, how its steps and its time are spent, and what happened to it."""

from grafana_foundation_sdk.builders import stat
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models import common as looks

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    JOB,
    Need,
    Query,
    Row,
    a_step,
    bars,
    count,
    curves,
    frame,
    goodput,
    levels,
    newest,
    number,
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


def job() -> Dashboard:
    """The dashboard."""
    rows = [_now(), _learning(), _speed(), _communication(), _time()]
    board = frame(
        "boost-job",
        "Boost / Job",
        "One training job, from its loss to how its time was spent.",
        rows,
        ["tenant", "job_name", "job_id"],
    )
    board = board.annotation(panels.restarts(JOB)).annotation(panels.layouts(JOB))
    return board.link(panels.to_dashboard("Ranks", "boost-ranks")).link(panels.to_service("/jobs/${job_id}"))


def _value(title: str, says: str, unit: str, expr: str) -> stat.Panel:
    return number(title, says, unit, Query(expr))


def _of_job(metric: str, legend: str, *by: str) -> Query:
    return Query(newest(metric, JOB, *by), legend)


def _now() -> Row:
    """How the job stands now: two lines of numbers."""
    step, target = newest("boost_job_step", JOB), newest("boost_job_target_steps", JOB)
    state = count("State", "What the job does.", "none", Query(newest("boost_job_info", JOB, "state"), "{{state}}"))
    pace = f"max(deriv(boost_job_step{{{JOB}}}[10m]))"
    good = _value(
        "Goodput", "Share of the job's time, without waiting, that went into new steps.", "percentunit", goodput(JOB)
    )
    silence = _value(
        "Last step",
        "Time since the newest step was done.",
        "s",
        f"time() - {newest('boost_job_progress_timestamp_seconds', JOB)}",
    ).decimals(0)
    age = _value(
        "Last checkpoint",
        "Time since the newest checkpoint was committed.",
        "s",
        f"time() - {newest('boost_job_checkpoint_timestamp_seconds', JOB)}",
    )
    restarts = _value(
        "Interruptions",
        "How often training resumed after an interruption.",
        "none",
        total(newest("boost_job_restarts_total", JOB, "cause")),
    )
    attempts = _value("Gangs", "Gangs started for the job.", "none", newest("boost_job_attempts_total", JOB))
    shown = [
        state.no_value("ended").text_mode(looks.BigValueTextMode.NAME),
        _value("Done", "Share of the job's steps that are done.", "percentunit", f"{step} / {target}").max(1),
        _value("Steps", "Optimizer steps done.", "locale", step),
        _value(
            "Time left",
            "Time until the last step, at the pace of the last ten minutes.",
            "s",
            f"({target} - {step}) / ({pace} > 0)",
        ),
        _value("Loss now", "Training loss of the newest step.", "suffix: nats", newest("boost_job_loss_nats", JOB)),
        _value("Speed", "Tokens trained on per second.", "si:tokens/s", newest("boost_job_tokens_per_second", JOB)),
        good.max(1).thresholds(levels("red", (0.5, "yellow"), (0.7, "green"))),
        silence.thresholds(levels("text", (120, "yellow"), (600, "red"))),
        age.decimals(0).thresholds(levels("text", (3600, "yellow"), (7200, "red"))),
        restarts.thresholds(levels("text", (1, "yellow"), (3, "red"))),
        attempts,
        _value("Workers", "Ranks that train.", "none", newest("boost_job_workers", JOB)),
    ]
    return Row("Now", shown)


def _learning() -> Row:
    loss = curves(
        "Loss",
        "Training loss of the newest step, and loss on validation text, in nats per token.",
        "suffix: nats",
        _of_job("boost_job_loss_nats", "training"),
        _of_job("boost_job_validation_loss_nats", "validation"),
    )
    norm = time_series(
        "Gradient norm",
        "Norm of the whole gradient before clipping.",
        "none",
        _of_job("boost_job_gradient_norm", "norm"),
    )
    learning_rate = time_series(
        "Learning rate", "Learning rate of the newest step.", "sci", _of_job("boost_job_learning_rate", "rate")
    )
    return Row("Learning", [loss, norm, learning_rate])


def _speed() -> Row:
    tokens = time_series(
        "Tokens",
        "Tokens trained on per second, as reported by the newest step, and as the total grows.",
        "si:tokens/s",
        _of_job("boost_job_tokens_per_second", "newest step"),
        Query(f"clamp_min(max(deriv(boost_job_tokens{{{JOB}}}[$__rate_interval])), 0)", "over time"),
    )
    tokens_of_a_worker = time_series(
        "Tokens of a worker",
        "Tokens trained on per second by each worker, which elasticity should not change.",
        "si:tokens/s",
        _of_job("boost_job_tokens_per_second_per_worker", "a worker"),
    )
    samples = time_series(
        "Samples",
        "Sequences trained on per second.",
        "suffix: samples/s",
        _of_job("boost_job_samples_per_second", "newest step"),
    )
    layout = time_series(
        "Layout",
        "Number of ranks that train, and their layout.",
        "none",
        _of_job("boost_job_workers", "workers"),
        _of_job("boost_job_tensor_parallel_size", "tensor parallel"),
        _of_job("boost_job_pipeline_parallel_size", "pipeline parallel"),
        _of_job("boost_job_context_parallel_size", "context parallel"),
        _of_job("boost_job_data_parallel_size", "data parallel"),
    )
    parts = time_series(
        "Parts of a step",
        "How a step's time is spent, averaged over the ranks.",
        "s",
        Query(a_step("boost_rank_step_part_seconds_total", JOB, "part"), "{{part}}"),
    )
    whole = time_series(
        "Step",
        "Duration of the newest step, and the parts spent waiting for data and for collectives.",
        "s",
        _of_job("boost_job_step_seconds", "step"),
        _of_job("boost_job_data_seconds", "data"),
        _of_job("boost_job_exposed_communication_seconds", "exposed communication"),
    )
    utilization = time_series(
        "FLOPs utilization",
        "FLOPs of the model, and also of recomputation, as shares of the devices' peak.",
        "percentunit",
        _of_job("boost_job_model_flops_utilization_ratio", "model"),
        _of_job("boost_job_hardware_flops_utilization_ratio", "hardware"),
    )
    flops = time_series(
        "Model FLOPs",
        "Model FLOPs per second of the whole gang.",
        "flops",
        _of_job("boost_job_model_flops_per_second", "model"),
    )
    seconds = time_series(
        "Step time and prediction",
        "The median of the newest steps, and what the plan predicted for the layout.",
        "s",
        _of_job("boost_job_median_step_seconds", "measured"),
        _of_job("boost_job_predicted_step_seconds", "predicted"),
    )
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
        "none",
        _of_job("boost_job_context_imbalance_ratio", "largest over mean"),
    )
    shown = [
        tokens,
        tokens_of_a_worker,
        samples,
        stepped(layout),
        stacked(parts),
        whole,
        utilization.max(1).no_value(Need.PEAK),
        flops,
    ]
    rest = [seconds, memory, imbalance.no_value(Need.CONTEXT)]
    return Row("Speed", [*(panel.span(6) for panel in shown), *(panel.span(8) for panel in rest)])


def _communication() -> Row:
    """Communication between a job's ranks: how long, how much, and which part training waits for."""
    counted_bytes = rate("boost_rank_communication_bytes_total", JOB, *_BY)
    bandwidth = share(counted_bytes, rate("boost_rank_communication_seconds_total", JOB, *_BY), *_BY)
    shares = time_series(
        "Share of the step",
        "Communication that training waits for, and the hidden part, as shares of the step's time.",
        "percentunit",
        Query(f"{_EXPOSED} / {_STEP}", "exposed"),
        Query(f"clamp_min({_WHOLE} - {_EXPOSED}, 0) / {_STEP}", "hidden"),
    )
    seconds = time_series(
        "Seconds by collective",
        "Duration of a step's collectives on a rank, from start to end, including hidden ones.",
        "s",
        Query(a_step("boost_rank_communication_seconds_total", JOB, *_BY), _LEGEND),
    )
    exposed = time_series(
        "Waited for by collective",
        "Time that a rank waits for the collectives of a step.",
        "s",
        Query(a_step("boost_rank_exposed_communication_seconds_total", JOB, *_BY), _LEGEND),
    )
    volume = time_series(
        "Bytes by collective",
        "Payload of a step's collectives on a rank.",
        "bytes",
        Query(a_step("boost_rank_communication_bytes_total", JOB, *_BY), _LEGEND),
    )
    speed = time_series(
        "Bandwidth by collective",
        "Payload divided by the duration of the collectives.",
        "binBps",
        Query(bandwidth, _LEGEND),
    )
    calls = time_series(
        "Calls by collective",
        "Collectives that a rank starts in a step.",
        "none",
        Query(a_step("boost_rank_communication_calls_total", JOB, *_BY), _LEGEND),
    )
    return Row("Communication", [stacked(shares), stacked(seconds), stacked(exposed), stacked(volume), speed, calls])


def _time() -> Row:
    seconds = newest("boost_job_goodput_seconds", JOB, "kind")
    spent = bars(
        "Where the time went",
        "How the job's time so far was spent.",
        "s",
        Query(f"sort_desc({seconds})", "{{kind}}"),
    )
    good = time_series(
        "Goodput of the last hour",
        "Share of the last hour, without waiting, that went into new steps; what BoostGoodputLow is based on.",
        "percentunit",
        _of_job("job:boost_job_goodput:ratio1h", "goodput"),
    )
    restarts = time_series(
        "Restarts",
        "How often training resumed after each kind of interruption.",
        "none",
        _of_job("boost_job_restarts_total", "{{cause}}", "cause"),
    )
    faults = time_series(
        "Faults",
        "How often a hang, a slow rank, a divergence or a failing store was detected.",
        "none",
        _of_job("boost_job_faults_total", "{{what}}", "what"),
    )
    recent = good.max(1).no_value(Need.HALF_AN_HOUR)
    return Row("Time", [spent.span(6), recent.span(6), stepped(restarts).span(6), stepped(faults).span(6)])
