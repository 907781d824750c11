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


def test_gpu_hours_are_counted_once_and_have_a_price(expect):
    series = {
        f'boost_{of}_gpus_held{{{of}="a", {replica}}}': "30x8"
        for of in ("tenant", "queue")
        for replica in (FIRST, SECOND)
    }
    for of in ("tenant", "queue"):  # two values of 30 within the minute
        expect(series, exprs("boost-fleet", f"GPU-hours by {of}")[0], {"1m": {f'{{{of}="a"}}': 1}})
        expect(series, exprs("boost-fleet", f"Cost by {of}")[0], {"1m": {f'{{{of}="a"}}': 2.5}})


# What other exporters give, a value every 15 s; the GPU-9, lo and tmpfs are none that anybody has asked for.
OTHERS = {
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{UUID="GPU-0", Hostname="n"}': "0.6x8",
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{UUID="GPU-9", Hostname="n"}': "0.9x8",
    'DCGM_FI_DEV_SM_CLOCK{UUID="GPU-0"}': "1410x8",
    'DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{UUID="GPU-0"}': "0+15x8",
    'DCGM_FI_DEV_THERMAL_VIOLATION{UUID="GPU-0"}': "0+3750000000x8",
    'DCGM_FI_DEV_POWER_VIOLATION{UUID="GPU-0"}': "0+3750000000x8",
    'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-0"}': "79x8",
    'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-9"}': "79x8",
    'DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{UUID="GPU-0"}': "0+1x8",
    'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{UUID="GPU-0"}': "0x8",
    'node_filesystem_avail_bytes{instance="n", mountpoint="/", fstype="ext4", device="sda"}': "25x8",
    'node_filesystem_size_bytes{instance="n", mountpoint="/", fstype="ext4", device="sda"}': "100x8",
    'node_filesystem_avail_bytes{instance="n", mountpoint="/run", fstype="tmpfs", device="t"}': "1x8",
    'node_filesystem_size_bytes{instance="n", mountpoint="/run", fstype="tmpfs", device="t"}': "100x8",
    'node_disk_io_time_seconds_total{instance="n", device="sda"}': "0+7.5x8",
    'node_network_receive_bytes_total{instance="n", device="eth0"}': "0+1500x8",
    'node_network_receive_bytes_total{instance="n", device="lo"}': "0+1500x8",
    'node_network_transmit_bytes_total{instance="n", device="eth0"}': "0+3000x8",
    'node_infiniband_port_data_received_bytes_total{instance="n", device="mlx5_0", port="1"}': "0+1500x8",
    'node_infiniband_port_data_transmitted_bytes_total{instance="n", device="mlx5_0", port="1"}': "0+3000x8",
    'node_vmstat_oom_kill{instance="n"}': "0 0 1 1 1 1",
    'kube_pod_container_status_restarts_total{pod="p", container="c", namespace="ml", uid="1"}': "0 0 1 1 1 1",
    'kube_pod_container_status_restarts_total{pod="q", container="c", namespace="ml", uid="2"}': "0 0 1 1 1 1",
    'kube_pod_container_status_last_terminated_reason{pod="p", container="c", reason="OOMKilled", uid="1"}': "1x8",
    'kube_pod_container_status_last_terminated_reason{pod="q", container="c", reason="Error", uid="2"}': "1x8",
    'kubelet_volume_stats_available_bytes{persistentvolumeclaim="v", node="n"}': "25x8",
    'kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="v", node="n"}': "100x8",
    'ray_object_store_memory{Location="MMAP_SHM", instance="n"}': "5x8",
    'ray_resources{Name="object_store_memory", State="AVAILABLE", instance="n"}': "3x8",
    'ray_resources{Name="object_store_memory", State="USED", instance="n"}': "5x8",
    'ray_resources{Name="CPU", State="USED", instance="n"}': "5x8",
}


@pytest.mark.full
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
        f"boost_job_context_imbalance_ratio{{{JOB}}}": "1.03x8",
        f"job:boost_job_goodput:ratio1h{{{JOB}}}": "0.9x8",
        f'ALERTS{{alertname="BoostRankSlow", alertstate="firing", severity="warning", rank="3", {JOB}}}': "1x8",
        **OTHERS,
    }
    of_gpu = '{rank="3", gpu="GPU-0"}'
    alert = f'{{alertname="BoostRankSlow", severity="warning", rank="3", {JOB}}}'
    found = {
        ("boost-ranks", "GPU utilization"): [{of_gpu: 0.5}],
        ("boost-ranks", "GPU memory"): [{of_gpu: 0.25}],
        ("boost-ranks", "GPU power"): [{of_gpu: 300}],
        ("boost-ranks", "GPU temperature"): [{of_gpu: 60}],
        ("boost-job", "FLOPs utilization"): [{"{}": 0.4}, {"{}": 0.5}],
        ("boost-job", "Imbalance of long context"): [{"{}": 1.03}],
        ("boost-job", "Goodput of the last hour"): [{"{}": 0.9}],
        ("boost-fleet", "Firing"): [{alert: 1}],
        ("boost-ranks", "Tensor cores"): [{of_gpu: 0.6}],
        ("boost-ranks", "SM clock"): [{of_gpu: 1.41e9}],
        ("boost-ranks", "NVLink"): [{of_gpu: 1}],
        ("boost-ranks", "Throttling"): [{of_gpu: 0.5}],
        ("boost-ranks", "XID"): [{of_gpu: 79}],
        ("boost-ranks", "ECC errors"): [{of_gpu: 4}],
        ("boost-nodes", "Disks"): [{'{instance="n", mountpoint="/"}': 0.75}],
        ("boost-nodes", "Disks at work"): [{'{instance="n", device="sda"}': 0.5}],
        ("boost-nodes", "Network"): [{'{instance="n", device="eth0"}': each} for each in (100, 200)],
        ("boost-nodes", "InfiniBand"): [{'{instance="n", device="mlx5_0"}': each} for each in (100, 200)],
        ("boost-nodes", "Out-of-memory kills"): [{'{instance="n"}': 1}],
        ("boost-nodes", "Containers over their limit"): [{'{pod="p", container="c"}': 1}],
        ("boost-nodes", "Free on the checkpoint volume"): [{'{persistentvolumeclaim="v"}': 25}],
        ("boost-nodes", "Free share of the checkpoint volume"): [{'{persistentvolumeclaim="v"}': 0.25}],
        ("boost-nodes", "Ray's object store"): [{'{Location="MMAP_SHM"}': 5}, {'{Name="object_store_memory"}': 8}],
    }
    assert set(found) == {(query.dashboard, query.panel) for query in queries() if need_of(query)}
    for place, values in found.items():
        for expr, value in zip(exprs(*place), values, strict=True):
            expect(series, expr, {"1m": value})
