"""Metrics as one reads them: a name, what it means, and how its value is had from what it is about."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Subject = TypeVar("Subject")
Values = Iterable[tuple[str, float]]  # each with the label that tells it apart

# Endings of names that are units, by Prometheus' conventions.
_UNITS = ("seconds", "bytes", "ratio", "nats")


@dataclass(frozen=True)
class Value(Generic[Subject]):
    """A metric with at most one value of each subject.

    Attributes:
        name: As Prometheus has it; one that ends with ``_total`` is a counter, all others are gauges.
        help: What it means.
        read: Gives the value; ``None`` when there is none yet.
    """

    name: str
    help: str
    read: Callable[[Subject], float | None]


@dataclass(frozen=True)
class Parts(Generic[Subject]):
    """A metric with several values of each subject; ``label`` is the name of what tells them apart."""

    name: str
    help: str
    label: str
    read: Callable[[Subject], Values]


def families(
    metrics: Sequence[Value[Subject] | Parts[Subject]],
    labels: Sequence[str],
    subjects: Sequence[tuple[Sequence[str], Subject]],
) -> Iterator[Metric]:
    """The metrics of some subjects, as prometheus-client writes them.

    Args:
        metrics: Which.
        labels: Names of the labels that all of them have.
        subjects: The values of these labels, and what they stand for.
    """
    for metric in metrics:
        match metric:
            case Value():
                found = family(metric.name, metric.help, labels)
                for values, subject in subjects:
                    value = metric.read(subject)
                    if value is not None:
                        found.add_metric(values, value)
            case Parts():
                found = family(metric.name, metric.help, (*labels, metric.label))
                for values, subject in subjects:
                    for part, value in metric.read(subject):
                        found.add_metric((*values, part), value)
        yield found


def family(name: str, help_text: str, labels: Sequence[str] = ()) -> CounterMetricFamily | GaugeMetricFamily:
    """A family without values; its type and its unit follow from the name."""
    if name.endswith("_total"):
        return CounterMetricFamily(name, help_text, labels=labels)
    unit = name.rsplit("_", 1)[-1]
    return GaugeMetricFamily(name, help_text, labels=labels, unit=unit if unit in _UNITS else "")
