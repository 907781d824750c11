"""A worker takes changes of values: those that its gang begins with, and those that come while it trains."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from boost_core.messages import Report, Steer, SteeredReport, StepReport
from service.gang.assignment import Assignment, End, Message
from service.gang.ray_train.rank_worker import RankWorker
from tests.jobs import tiny_job, write_corpus
from tests.unit.test_aborted import a_worker


def test_a_worker_makes_the_changes_that_it_is_given(tmp_path: Path) -> None:
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), tmp_path / "job", parallelism={"tensor_parallel_size": 1},
        training={"steps": 6},
    )  # fmt: skip
    steers = []
    for number, rate in enumerate((0.5, 0.25), 1):
        optimizer = spec.steering.optimizer.model_copy(update={"learning_rate": rate})
        steering = spec.steering.model_copy(update={"optimizer": optimizer})
        steers.append(Steer(number=number, by="alice", requested_at=datetime.now(UTC), steering=steering))
    reports: list[Report] = []

    def push(message: Message) -> None:
        reports.extend(report for _, report in message.reports)

    worker = a_worker(push)
    RankWorker.command(SimpleNamespace(_worker=worker), steers[1])  # it is in no gang yet, and is told again later
    assignment = Assignment(1, spec, 0, worker.rendezvous(), (), steers=(steers[0],))
    worker.join(assignment, None)
    assert worker.membership is not None
    after_step = worker.membership.after_step

    def give_second(times) -> None:
        if times.step == 3:
            RankWorker.command(SimpleNamespace(_worker=worker), steers[1])
        after_step(times)

    worker.membership.after_step = give_second
    assert worker.train(assignment).how is End.FINISHED
    assert [report.step for report in reports if isinstance(report, SteeredReport)] == [0, 4]
    rates = {report.step: report.learning_rate for report in reports if isinstance(report, StepReport)}
    assert [rates[step] for step in (1, 2)] == [0.25, 0.5]  # the warm-up is of two steps
    assert 0.25 < rates[4] < 0.5 and rates[5] < 0.25
