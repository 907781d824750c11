"""How a job stands now, in numbers."""

from grafana_foundation_sdk.builders import stat

from deploy.grafana.source.frame import Row
from deploy.grafana.source.numbers import levels, number, word
from deploy.grafana.source.panels import Query
from deploy.grafana.source.promql import JOB, goodput, newest, total


def row() -> Row:
    """Two lines of numbers."""
    return Row("Now", [*_progress(), *_health()])


def _value(title: str, says: str, unit: str, expr: str) -> stat.Panel:
    return number(title, says, unit, Query(expr))


def _progress() -> list[stat.Panel]:
    step, target = newest("boost_job_step", JOB), newest("boost_job_target_steps", JOB)
    pace = f"max(deriv(boost_job_step{{{JOB}}}[10m]))"
    return [
        _state(),
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
    ]


def _health() -> list[stat.Panel]:
    good = _value(
        "Goodput", "Share of the job's time, without waiting, that went into new steps.", "percentunit", goodput(JOB)
    )
    silence = _value("Last step", "Time since the newest step was done.", "s", _since("progress")).decimals(0)
    age = _value("Last checkpoint", "Time since the newest checkpoint was committed.", "s", _since("checkpoint"))
    restarts = _value(
        "Interruptions",
        "How often training resumed after an interruption.",
        "none",
        total(newest("boost_job_restarts_total", JOB, "cause")),
    )
    attempts = _value("Gangs", "Gangs started for the job.", "none", newest("boost_job_attempts_total", JOB))
    return [
        good.max(1).thresholds(levels("red", (0.5, "yellow"), (0.7, "green"))),
        silence.thresholds(levels("text", (120, "yellow"), (600, "red"))),
        age.decimals(0).thresholds(levels("text", (3600, "yellow"), (7200, "red"))),
        restarts.thresholds(levels("text", (1, "yellow"), (3, "red"))),
        attempts,
        _value("Workers", "Ranks that train.", "none", newest("boost_job_workers", JOB)),
    ]


def _state() -> stat.Panel:
    return word("State", "What the job does.", Query(newest("boost_job_info", JOB, "state"), "{{state}}"), "ended")


def _since(what: str) -> str:
    return f"time() - {newest(f'boost_job_{what}_timestamp_seconds', JOB)}"
