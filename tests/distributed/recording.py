"""Runs the product's training loop on ranks and keeps what it reported."""

import logging
from pathlib import Path

from boost_core.config import JobSpec
from boost_core.messages import Report, report_adapter
from boost_core.train import train


class Recorder:
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def report(self, report: Report) -> None:
        self.reports.append(report)


def train_and_record(spec: JobSpec) -> list[Report]:
    recorder = Recorder()
    train(spec, recorder)
    return recorder.reports


def train_and_record_warnings(spec: JobSpec) -> tuple[list[Report], list[str]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    logging.getLogger("boost_core").addHandler(handler)
    try:
        return train_and_record(spec), [record.getMessage() for record in records]
    finally:
        logging.getLogger("boost_core").removeHandler(handler)


def losses(reports: list[Report]) -> dict[int, float]:
    """Loss by step."""
    return {report.step: report.loss for report in reports if report.kind == "progress"}


def read_reports(path: Path) -> list[Report]:
    return [report_adapter.validate_json(line) for line in path.read_text().splitlines()]
