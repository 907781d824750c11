"""A job's events as readable lines."""

from typing import Any

from pydantic import ValidationError

from boost_core import messages
from boost_core.messages import Report, Scores, report_adapter
from boost_core.plan.resolve import ChosenLayouts
from service.cli.output.job_text import layouts_in_words, score_in_words
from service.jobs.model import JobEvent

_OF_THE_SERVICE = frozenset(
    {"state", "patch", "drill", "scores", "layouts"}
)  # event kinds that are not reports of the trainer


def report_of(event: JobEvent) -> Report | None:
    """Return the trainer's report in an event; ``None`` for the service's own events and reports of newer trainers."""
    if event.kind in _OF_THE_SERVICE:
        return None
    try:
        return report_adapter.validate_python(event.data)
    except ValidationError:
        return None


def line_of(event: JobEvent) -> str:
    """Return one line that says what happened, with the local time."""
    report = report_of(event)
    text = _line_as_it_is(event) if report is None else messages.line_of(report)
    return f"{event.time.astimezone():%H:%M:%S}  {text}"


def _line_as_it_is(event: JobEvent) -> str:
    data = event.data
    match event.kind:
        case "patch":
            return "changed: " + ", ".join(
                f"{field} from {_value(change['from'])} to {_value(change['to'])}" for field, change in data.items()
            )
        case "drill":
            when = "at once" if data["at_step"] is None else f"after step {data['at_step']}"
            return f"drill requested: {data['kind']}, rank {data['rank']}, {when}"
        case "scores":
            listed = "; ".join(score_in_words(score) for score in Scores.model_validate(data).scores)
            return f"step {data['step']}  scores: {listed}"
        case "layouts":
            return layouts_in_words(ChosenLayouts.model_validate(data))
        case "state":
            return f"{data['state']}: {data['message']}"
        case _:
            return f"{event.kind}: {data.get('message', data)}"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value['min']}–{value['max']}" if isinstance(value, dict) else str(value)
