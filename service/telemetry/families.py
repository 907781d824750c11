"""Declarative metrics: a name, a help text, and how to read the value from its subject."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

Subject = TypeVar("Subject")
Values = Iterable[tuple[str, float]]  # each with its distinguishing label

# Name suffixes that are units, by Prometheus' conventions.
_UNITS = ("seconds", "bytes", "ratio", "nats")


@dataclass(frozen=True)
class Value(Generic[Subject]):
    """A metric with at most one value per subject.

    Attributes:
        name: Name in Prometheus; names ending in ``_total`` are counters, all others gauges.
        help: Help text.
        read: Reads the value; ``None`` if there is none yet.
    """

    name: str
    help: str
    read: Callable[[Subject], float | None]


@dataclass(frozen=True)
class Parts(Generic[Subject]):
    """A metric with several values per subject; ``label`` is the name of the label that distinguishes them."""

    name: str
    help: str
    label: str
    read: Callable[[Subject], Values]


def families(
    metrics: Sequence[Value[Subject] | Parts[Subject]],
    labels: Sequence[str],
    subjects: Sequence[tuple[Sequence[str], Subject]],
) -> Iterator[Metric]:
    """Yield the metrics of some subjects in prometheus-client's form.

    Args:
        metrics: The metrics.
        labels: Names of their common labels.
        subjects: The values of these labels, and the subjects they stand for.
    """
    for metric in metrics:
        match metric:
            case Value():
                result = family(metric.name, metric.help, labels)
                for values, subject in subjects:
                    value = metric.read(subject)
                    if value is not None:
                        result.add_metric(values, value)
            case Parts():
                result = family(metric.name, metric.help, (*labels, metric.label))
                for values, subject in subjects:
                    for part, value in metric.read(subject):
                        result.add_metric((*values, part), value)
        yield result


def family(name: str, help_text: str, labels: Sequence[str] = ()) -> CounterMetricFamily | GaugeMetricFamily:
    """Return a family without values; its type and unit follow from the name."""
    if name.endswith("_total"):
        return CounterMetricFamily(name, help_text, labels=labels)
    unit = name.rsplit("_", 1)[-1]
    return GaugeMetricFamily(name, help_text, labels=labels, unit=unit if unit in _UNITS else "")
