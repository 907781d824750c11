"""What the dashboards' queries make of series that we choose, by Prometheus' own engine: ``promtool test rules``."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.deploy.dashboards import need_of, queries
from tests.prometheus import promtool

JOB = 'job_id="job-1", job_name="a", tenant="lab"'
CHOICES = {"job_id": "job-1", "__rate_interval": "1m", "__interval": "15s", "__range": "1m"}

Values = Mapping[str, float]  # by labels, in braces
FIRST, SECOND = 'instance="one"', 'instance="two"'


def exprs(dashboard: str, panel: str) -> list[str]:
    found = [query.expr for query in queries(CHOICES) if (query.dashboard, query.panel) == (dashboard, panel)]
    assert found, f"{dashboard} has no panel {panel}"
    return found


@pytest.fixture
def expect(tmp_path: Path):
    def expect(series: Mapping[str, str], expr: str, at: Mapping[str, Values]) -> None:
        """Hold an expression's values against ``at``: time → labels → value; the series have a value every 15 s."""
        cases = [
            {
                "expr": expr,
                "eval_time": time,
                "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
            }
            for time, values in at.items()
        ]
        given = [{"series": name, "values": values} for name, values in series.items()]
        test = {"interval": "15s", "input_series": given, "promql_expr_test": cases}
        file = tmp_path / "test.yml"
        file.write_text(yaml.safe_dump({"evaluation_interval": "15s", "tests": [test]}))
        promtool("test", "rules", file)

    return expect


def test_a_value_that_is_none_of_the_query_is_found(expect):
    with pytest.raises(AssertionError, match="exp"):
        expect({"up": "1x4"}, "up", {"30s": {"up": 2}})


def test_what_two_replicas_show_of_a_job_counts_once(expect):
    series = {
        f"boost_job_tokens_per_second{{{JOB}, {FIRST}}}": "100x8",
        f"boost_job_tokens_per_second{{{JOB}, {SECOND}}}": "100x8",
        f'boost_job_tokens_per_second{{job_id="job-2", job_name="a", tenant="birds", {FIRST}}}': "50x8",
    }
    expect(series, exprs("boost-fleet", "Tokens")[0], {"1m": {"{}": 150}})
    expect(series, exprs("boost-job", "Speed")[0], {"1m": {"{}": 100}})


def test_a_restart_is_marked_once_with_its_cause_also_when_it_is_the_first(expect):
    series = {
        f'boost_job_restarts_total{{{JOB}, cause="HANG", {FIRST}}}': "0x3 1x9",
        f'boost_job_restarts_total{{{JOB}, cause="HANG", {SECOND}}}': "0x3 1x9",
        f'boost_job_restarts_total{{{JOB}, cause="WORKER_LOST", {FIRST}}}': "_x9 2x4",
    }
    hang, lost = '{job_name="a", cause="HANG"}', '{job_name="a", cause="WORKER_LOST"}'
    marks = {"45s": {}, "60s": {hang: 1}, "75s": {}, "120s": {}, "135s": {lost: 2}, "150s": {}}
    expect(series, exprs("boost-job", "annotation Restarts")[0], marks)


def test_restarts_are_counted_when_they_happen(expect):
    series = {
        f'boost_job_restarts_total{{{JOB}, cause="HANG", {FIRST}}}': "0x3 2x9",
        f'boost_job_restarts_total{{job_id="job-2", job_name="b", tenant="lab", cause="HANG", {FIRST}}}': "0x3 1x9",
    }
    hang = '{cause="HANG"}'
    counted = {"45s": {hang: 0}, "60s": {hang: 3}, "75s": {hang: 0}}
    expect(series, exprs("boost-fleet", "Restarts by cause")[0], counted)


def test_a_change_of_shape_is_marked_with_what_changed(expect):
    series = {
        f"boost_job_workers{{{JOB}, {FIRST}}}": "6x3 4x9",
        f"boost_job_data_parallel_size{{{JOB}, {FIRST}}}": "3x3 2x9",
        f"boost_job_tensor_parallel_size{{{JOB}, {FIRST}}}": "2x12",
    }
    workers = '{job_name="a", axis="workers", size="4"}'
    replicas = '{job_name="a", axis="data parallel", size="2"}'
    marks = {"45s": {}, "60s": {workers: 1, replicas: 1}, "75s": {}}
    expect(series, exprs("boost-job", "annotation Layout")[0], marks)


def test_goodput_leaves_waiting_out(expect):
    series = {
        f'boost_job_goodput_seconds{{{JOB}, kind="{kind}"}}': f"{seconds}x8"
        for kind, seconds in {"productive": 75, "restart": 20, "compile": 5, "waiting": 900}.items()
    }
    for dashboard in ("boost-job", "boost-fleet"):
        expect(series, exprs(dashboard, "Goodput")[0], {"1m": {"{}": 0.75}})


def test_the_slow_rank_is_seen_where_it_computes_and_the_others_where_they_wait(expect):
    series = {}
    for rank, (forward, waiting) in enumerate([(2, 6), (8, 0)]):  # seconds in every 15 s, of one step
        of = f'{JOB}, rank="{rank}"'
        series[f"boost_rank_steps_total{{{of}}}"] = "0+1x20"
        series[f'boost_rank_step_part_seconds_total{{{of}, part="forward"}}'] = f"0+{forward}x20"
        series[f'boost_rank_step_part_seconds_total{{{of}, part="exposed_communication"}}'] = f"0+{waiting}x20"
    first, second = '{rank="0"}', '{rank="1"}'
    expect(series, exprs("boost-ranks", "Own time in a step")[0], {"4m": {first: 2, second: 8}})
    expect(series, exprs("boost-ranks", "Exposed communication")[0], {"4m": {first: 6, second: 0}})
    parts = {'{part="forward"}': 5, '{part="exposed_communication"}': 3}
    expect(series, exprs("boost-job", "Parts of a step")[0], {"4m": parts})


def test_communication_is_told_apart_into_what_is_waited_for_and_what_is_hidden(expect):
    line = f'{JOB}, rank="0", collective="all_reduce", group="tp"'
    series = {
        f'boost_rank_steps_total{{{JOB}, rank="0"}}': "0+1x20",
        f'boost_rank_step_part_seconds_total{{{JOB}, rank="0", part="forward"}}': "0+8x20",
        f"boost_rank_communication_seconds_total{{{line}}}": "0+4x20",
        f"boost_rank_exposed_communication_seconds_total{{{line}}}": "0+1x20",
        f"boost_rank_communication_bytes_total{{{line}}}": "0+4096x20",
    }
    exposed, hidden = exprs("boost-job", "Share of the step")
    expect(series, exposed, {"4m": {"{}": 0.125}})
    expect(series, hidden, {"4m": {"{}": 0.375}})
    of_line = '{collective="all_reduce", group="tp"}'
    expect(series, exprs("boost-job", "Bandwidth by collective")[0], {"4m": {of_line: 1024}})
    expect(series, exprs("boost-job", "Waited for by collective")[0], {"4m": {of_line: 1}})


def test_queries_that_no_test_machine_has_data_for_find_it_where_there_is_some(expect):
    gpu = f'{JOB}, rank="3", gpu="GPU-0"'
    series = {
        f"boost_rank_gpu_utilization_ratio{{{gpu}}}": "0.5x8",
        f"boost_rank_gpu_memory_used_bytes{{{gpu}}}": "20x8",
        f"boost_rank_gpu_memory_total_bytes{{{gpu}}}": "80x8",
        f"boost_rank_gpu_power_watts{{{gpu}}}": "300x8",
        f"boost_rank_gpu_temperature_celsius{{{gpu}}}": "60x8",
        f"boost_job_model_flops_utilization_ratio{{{JOB}}}": "0.4x8",
        f"boost_job_hardware_flops_utilization_ratio{{{JOB}}}": "0.5x8",
        f"job:boost_job_goodput:ratio1h{{{JOB}}}": "0.9x8",
        f'ALERTS{{alertname="BoostRankSlow", alertstate="firing", severity="warning", rank="3", {JOB}}}': "1x8",
    }
    of_gpu = '{rank="3", gpu="GPU-0"}'
    alert = f'{{alertname="BoostRankSlow", severity="warning", rank="3", {JOB}}}'
    found = {
        ("boost-ranks", "GPU utilization"): [{of_gpu: 0.5}],
        ("boost-ranks", "GPU memory"): [{of_gpu: 0.25}],
        ("boost-ranks", "GPU power"): [{of_gpu: 300}],
        ("boost-ranks", "GPU temperature"): [{of_gpu: 60}],
        ("boost-job", "FLOPs utilization"): [{"{}": 0.4}, {"{}": 0.5}],
        ("boost-job", "Goodput of the last hour"): [{"{}": 0.9}],
        ("boost-fleet", "Firing"): [{alert: 1}],
    }
    assert set(found) == {(query.dashboard, query.panel) for query in queries() if need_of(query)}
    for place, values in found.items():
        for expr, value in zip(exprs(*place), values, strict=True):
            expect(series, expr, {"1m": value})
