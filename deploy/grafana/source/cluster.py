"""The cluster's dashboards: all jobs at a glance, the scheduler, checkpoints, and the machines.

They say whether the cluster is used, and used well, which jobs wait and why, what is saved of them, and what is wrong.
"""

from grafana_foundation_sdk.builders import statetimeline, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, TextBoxVariable
from grafana_foundation_sdk.models.dashboard import ValueMap, ValueMappingResult

from deploy.grafana.source import panels
from deploy.grafana.source.panels import (
    EARLIER,
    GPU_HOUR_PRICE,
    JOBS,
    NAMES,
    OF_JOBS,
    PROMETHEUS,
    TENANTS,
    TOOLTIP,
    Column,
    Need,
    Query,
    Row,
    bars,
    count,
    counted,
    frame,
    goodput,
    levels,
    newest,
    over_time,
    quantiles,
    rate,
    share,
    stacked,
    stepped,
    table,
    time_series,
    to_service,
    total,
)

_FIRING = 'ALERTS{alertname=~"Boost.*", alertstate="firing"}'
_QUEUED = newest("boost_queue_jobs", 'state!="RUNNING"', "queue", "state")

# Of machines, as node_exporter and others see them.
_NODES = 'instance=~"$instance"'
_DISKS = f'{_NODES}, fstype!~"tmpfs|overlay|squashfs|ramfs"'
_CARDS = f'{_NODES}, device!~"lo|veth.*|cali.*|cilium.*|docker.*|cni.*|flannel.*"'


def fleet() -> Dashboard:
    """All jobs and the cluster at a glance."""
    labels = {"alertname": "Alert", "severity": "Severity", "job_name": "Job", "tenant": "Tenant", "job_id": "Id"}
    alerts = table(
        "Firing",
        "Firing alerts and what they are about; the runbook has a page for each.",
        {**labels, "queue": "Queue", "rank": "Rank"},
        [Column("", "none", f"max by ({', '.join(labels)}, queue, rank) ({_FIRING})")],
    )
    now = [
        count(
            "GPUs",
            "GPUs that the nodes have.",
            "none",
            newest("boost_cluster_resources", 'resource="GPU", condition="total"'),
        ),
        count(
            "Free GPUs",
            "GPUs that no gang holds.",
            "none",
            newest("boost_cluster_resources", 'resource="GPU", condition="free"'),
        ),
        count("Running jobs", "Jobs that have a gang.", "none", newest("boost_jobs", 'state="RUNNING"')),
        count("Waiting jobs", "Jobs that are queued or waiting for resources.", "none", total(_QUEUED)),
        count(
            "Tokens",
            "Tokens trained on per second, over all jobs.",
            "si:tokens/s",
            total(newest("boost_job_tokens_per_second", TENANTS, "job_id")),
        ),
        count(
            "Goodput",
            "Share of the jobs' time, without waiting, that went into new steps.",
            "percentunit",
            goodput(TENANTS),
        )
        .no_value("–")
        .thresholds(levels("red", (0.5, "yellow"), (0.7, "green"))),
        count("Alerts", "Alerts that fire.", "none", f"count({_FIRING}) or vector(0)").thresholds(
            levels("green", (1, "red"))
        ),
        count(
            "Failed jobs",
            "Jobs that have failed within the selected time range.",
            "none",
            'max(delta(boost_jobs{state="FAILED"}[$__range]))',
        )
        .decimals(0)
        .thresholds(levels("text", (1, "yellow"))),
        count(
            "Restarts",
            "How often jobs resumed after interruptions within the selected time range.",
            "none",
            total(f"max by (job_id, cause) (increase(boost_job_restarts_total{{{TENANTS}}}[$__range]))"),
        )
        .decimals(0)
        .thresholds(levels("text", (1, "yellow"))),
        count(
            "Longest wait now",
            "Waiting time of the job that has waited longest.",
            "s",
            newest("boost_queue_oldest_wait_seconds"),
        ).thresholds(levels("text", (3600, "yellow"), (86400, "red"))),
        count(
            "Draining nodes", "Nodes about to leave.", "none", newest("boost_cluster_nodes", 'condition="draining"')
        ).thresholds(levels("text", (1, "yellow"))),
        count(
            "Replicas", "Processes of the API that Prometheus can reach.", "none", 'sum(up{job="boost-api"})'
        ).thresholds(levels("red", (1, "text"))),
        alerts.height(5).no_value(Need.ALERT),
    ]

    jobs = table(
        "Jobs",
        "Each job that has not ended.",
        {**OF_JOBS, "state": "State", "queue": "Queue", "family": "Family"},
        [
            Column("", "none", _of_jobs("info", TENANTS, "state", "queue", "family")),
            Column("Workers", "none", _of_jobs("workers", TENANTS)),
            Column("Done", "percentunit", f"{_of_jobs('step', TENANTS)} / {_of_jobs('target_steps', TENANTS)}"),
            Column("Loss", "suffix: nats", _of_jobs("loss_nats", TENANTS)),
            Column("Speed", "si:tokens/s", _of_jobs("tokens_per_second", TENANTS)),
            Column("Goodput", "percentunit", goodput(TENANTS, *NAMES)),
            Column("Restarts", "none", total(_of_jobs("restarts_total", TENANTS, "cause"), *NAMES)),
            Column("Last step", "s", f"time() - {_of_jobs('progress_timestamp_seconds', TENANTS)}"),
        ],
    )
    states = time_series(
        "Jobs by state", "Number of jobs in each state, except those that have ended.", "none",
        Query(newest("boost_jobs", 'state!~"SUCCEEDED|FAILED|CANCELLED"', "state"), "{{state}}"),
    )  # fmt: skip

    tokens = time_series(
        "Tokens by job", "Tokens trained on per second, over all jobs.", "si:tokens/s",
        Query(_of_jobs("tokens_per_second", TENANTS), "{{job_name}}"),
    )  # fmt: skip
    spent = bars(
        "Where the time went", "How the time of all jobs that have not ended was spent.", "s",
        Query(f"sort_desc({total(_of_jobs('goodput_seconds', TENANTS, 'kind'), 'kind')})", "{{kind}}"),
    )  # fmt: skip
    before = newest("boost_job_restarts_total", TENANTS, *NAMES, "cause", offset=EARLIER)
    restarts = time_series(
        "Restarts by cause", "How often jobs resumed after each kind of interruption.", "none",
        Query(total(f"{_of_jobs('restarts_total', TENANTS, 'cause')} - {before}", "cause"), "{{cause}}"),
    )  # fmt: skip

    gpus = time_series(
        "GPUs by tenant", "GPUs that each tenant's gangs hold, and free GPUs.", "suffix: GPUs",
        Query(newest("boost_tenant_gpus_held", TENANTS, "tenant"), "{{tenant}}"),
        Query(newest("boost_cluster_resources", 'resource="GPU", condition="free"'), "free"),
    )  # fmt: skip
    cpus = time_series(
        "CPUs", "CPUs of all nodes, and free CPUs.", "suffix: CPUs",
        Query(newest("boost_cluster_resources", 'resource="CPU"', "condition"), "{{condition}}"),
    )  # fmt: skip
    machines = time_series(
        "Nodes", "Nodes that stay, and nodes about to leave.", "none",
        Query(newest("boost_cluster_nodes", "", "condition"), "{{condition}}"),
    )  # fmt: skip

    # What the time that is looked at has cost, by tenant and by queue: GPU-hours, and their price.
    use = []
    for of in ("tenant", "queue"):
        held = newest(f"boost_{of}_gpus_held", TENANTS if of == "tenant" else "", of)
        hours = f"sum_over_time({held}[$__range:1m]) / 60"  # a value a minute, and none where nobody looked
        says = f"GPU-hours that the gangs of each {of} have held within the selected time range."
        use.append(bars(f"GPU-hours by {of}", says, "suffix: h", Query(f"sort_desc({hours})", f"{{{{{of}}}}}")))
        says = f"Their cost at the price of a GPU-hour set at the top, in its currency, for each {of}."
        cost = Query(f"sort_desc({hours} * $gpu_hour_price)", f"{{{{{of}}}}}")
        use.append(bars(f"Cost by {of}", says, "none", cost).decimals(2))

    requests = time_series(
        "Requests", "Requests answered per second, by route.", "reqps",
        Query(rate("boost_http_requests_total", "", "method", "route"), "{{method}} {{route}}"),
    )  # fmt: skip
    refused = time_series(
        "Refused and failed", "Requests answered with an error per second.", "reqps",
        Query(rate("boost_http_requests_total", 'status=~"[45].."', "status"), "{{status}}"),
    )  # fmt: skip
    duration = quantiles("Duration", "Duration of requests, without streams.", "boost_http_request_duration_seconds")
    streams = time_series(
        "Streams", "Open event streams of each replica.", "none",
        Query("max by (instance) (boost_http_streams)", "{{instance}}"),
    )  # fmt: skip

    rows = [
        Row("Now", now),
        Row("Jobs", [jobs, stepped(states), *_queues()]),
        Row("Training", [stacked(tokens), spent, counted(restarts)]),
        Row("Cluster", [stacked(gpus), stepped(cpus), stepped(machines)]),
        Row("Use", [panel.span(6) for panel in use]),
        Row("API", [panel.span(6) for panel in (requests, refused, duration, stepped(streams))]),
    ]
    board = frame("boost-fleet", "Boost / Fleet", "All jobs, queues and machines at a glance.", rows, ["tenant"])
    # What a GPU costs in an hour, in whichever currency; the chart sets it.
    price = TextBoxVariable(GPU_HOUR_PRICE).label("Price of a GPU-hour").default_value("0")
    return board.with_variable(price).annotation(panels.restarts(TENANTS)).link(to_service())


def _of_jobs(metric: str, where: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", where, *NAMES, *by)


def _queues() -> list[timeseries.Panel]:
    """How many jobs of each queue wait, and for how long."""
    waiting = time_series(
        "Jobs that wait", "Jobs of each queue that are queued or waiting for resources.", "none",
        Query(total(_QUEUED, "queue"), "{{queue}}"),
    )  # fmt: skip
    longest = time_series(
        "Longest wait", "Waiting time of the job that has waited longest in each queue.", "s",
        Query(newest("boost_queue_oldest_wait_seconds", "", "queue"), "{{queue}}"),
    )  # fmt: skip
    return [stepped(waiting), longest]


def scheduler() -> Dashboard:
    """The scheduler: whether it runs, how long its passes take, which jobs wait, and the use of limits."""
    leaders = count(
        "Schedulers", "Number of replicas that hold the lease: one, or none for some seconds when it changes hands.",
        "none", "sum(boost_scheduler_leading)",
    )  # fmt: skip
    failing = count(
        "Failed passes", "Passes that failed within the selected time range.", "none",
        'sum(increase(boost_scheduler_passes_total{outcome="failed"}[$__range]))',
    )  # fmt: skip
    seen = count(
        "Cluster seen", "Time since the scheduler last saw the cluster.", "s",
        f"time() - {newest('boost_cluster_seen_timestamp_seconds')}",
    )  # fmt: skip
    # A band for each replica, whose colour says whether it schedules.
    words = {
        "0": ValueMappingResult("stands by", "semi-dark-blue"),
        "1": ValueMappingResult("schedules", "semi-dark-green"),
    }
    leading = statetimeline.Panel().title("Who schedules").description("Which replica holds the lease.")
    leading = leading.datasource(PROMETHEUS).unit("none").mappings([ValueMap(words)]).tooltip(TOOLTIP)
    leading = leading.targets(over_time([Query("max by (instance) (boost_scheduler_leading)", "{{instance}}")]))
    duration = quantiles("Duration", "Duration of a pass over all jobs.", "boost_scheduler_pass_duration_seconds")
    outcomes = time_series(
        "Passes", "Passes per second, by outcome.", "suffix: passes/s",
        Query(rate("boost_scheduler_passes_total", "", "outcome"), "{{outcome}}"),
    )  # fmt: skip
    passes = [
        leaders.thresholds(levels("red", (1, "green"), (2, "red"))),
        failing.decimals(0).thresholds(levels("text", (1, "yellow"), (10, "red"))),
        seen.thresholds(levels("text", (30, "yellow"), (120, "red"))),
        leading.height(4).span(12),
        duration.span(12),
        outcomes.span(12),
    ]

    running = time_series(
        "Jobs that run", "Jobs of each queue that have a gang.", "none",
        Query(newest("boost_queue_jobs", 'state="RUNNING"', "queue"), "{{queue}}"),
    )  # fmt: skip
    jobs = table(
        "Waiting jobs",
        "Jobs that are queued or waiting for resources, and their waiting times.",
        OF_JOBS,
        [Column("Waits", "s", newest("boost_job_waiting_seconds", "", *NAMES))],
    )

    limits = []
    for of in ("queue", "tenant"):
        held, limit = newest(f"boost_{of}_gpus_held", "", of), newest(f"boost_{of}_gpus_limit", "", of)
        panel = time_series(
            f"By {of}", f"GPUs that the gangs of each {of} hold, and its limit, if any.", "suffix: GPUs",
            Query(held, f"{{{{{of}}}}}"), Query(limit, f"{{{{{of}}}}} limit"),
        )  # fmt: skip
        limits.append(stepped(panel).span(12))

    says = "Which replica schedules and how fast, which jobs wait, and how much of their limits queues and tenants use."
    waiting = [*_queues(), stepped(running), jobs]
    rows = [Row("Passes", passes), Row("Waiting", waiting), Row("GPUs held", limits)]
    return frame("boost-scheduler", "Boost / Scheduler", says, rows).link(to_service())


def checkpoints() -> Dashboard:
    """Checkpoints of all jobs: their age, size and duration, and whether the store accepts them."""
    size, seconds = _of_jobs("checkpoint_bytes", JOBS), _of_jobs("checkpoint_commit_seconds", JOBS)
    blocked = _of_jobs("checkpoint_seconds", JOBS)
    age = f"time() - {_of_jobs('checkpoint_timestamp_seconds', JOBS)}"
    at_risk = f"{_of_jobs('step', JOBS)} - {_of_jobs('checkpoint_step', JOBS)}"
    newest_ones = table(
        "Newest checkpoints",
        "Each job's newest checkpoint.",
        OF_JOBS,
        [
            Column("Step", "locale", _of_jobs("checkpoint_step", JOBS)),
            Column("Age", "s", age),
            Column("Steps since", "locale", at_risk),
            Column("Size", "bytes", size),
            Column("Held training", "s", blocked),
            Column("Took to commit", "s", seconds),
        ],
    )
    safe = [
        newest_ones,
        _each_job("Age", "Time since each job's newest checkpoint was committed.", "s", age),
        stepped(_each_job("Steps since", "Steps that are not in a checkpoint yet.", "locale", at_risk)),
    ]

    whole = total(newest("boost_job_goodput_seconds", JOBS, *NAMES, "kind"), *NAMES)
    spent = newest("boost_job_goodput_seconds", f'{JOBS}, kind="checkpoint"', *NAMES)
    says = "Share of each job's time for which checkpoints and copies blocked it."
    cost = [
        _each_job("Held training", "How long the newest checkpoint blocked the step loop.", "s", blocked),
        _each_job("Share of the job's time", says, "percentunit", share(spent, whole, *NAMES)),
    ]

    says = "From the time training continued until the newest checkpoint was committed."
    speed = share(size, f"({seconds} > 0)", *NAMES)
    faults = newest("boost_job_faults_total", f'{JOBS}, what="store"', *NAMES)
    store = [
        _each_job("Time to commit", says, "s", seconds),
        _each_job("Speed", "Size of the newest checkpoint divided by the time to commit it.", "binBps", speed),
        stepped(_each_job("Size", "Size of the newest checkpoint.", "bytes", size)),
        stepped(
            _each_job("Store faults", "How often saving was abandoned or had to wait for the store.", "none", faults)
        ),
    ]

    says = "How much of each job is saved, what saving costs, and whether the store accepts it."
    rows = [Row("What is safe", safe), Row("What saving costs", cost), Row("The store", store)]
    board = frame("boost-checkpoints", "Boost / Checkpoints", says, rows, ["tenant", "job_name"])
    return board.annotation(panels.restarts(JOBS)).link(to_service())


def _each_job(title: str, says: str, unit: str, expr: str) -> timeseries.Panel:
    return time_series(title, says, unit, Query(expr, "{{job_name}} {{job_id}}")).span(12)


def nodes() -> Dashboard:
    """The cluster's machines, as other exporters see them: disks, networks, memory, the checkpoint volume."""
    full = time_series(
        "Disks", "Used share of each file system; Ray writes its logs and what does not fit into memory there.",
        "percentunit",
        Query(
            f"1 - min by (instance, mountpoint) (node_filesystem_avail_bytes{{{_DISKS}}} "
            f"/ node_filesystem_size_bytes{{{_DISKS}}})",
            "{{instance}} {{mountpoint}}",
        ),
    )  # fmt: skip
    busy = time_series(
        "Disks at work", "Share of time in which a disk was busy.", "percentunit",
        Query(
            f"max by (instance, device) (rate(node_disk_io_time_seconds_total{{{_NODES}}}[$__rate_interval]))",
            "{{instance}} {{device}}",
        ),
    )  # fmt: skip
    free, whole = (
        f"min by (persistentvolumeclaim) (kubelet_volume_stats_{what}_bytes)" for what in ("available", "capacity")
    )
    left = time_series(
        "Free on the checkpoint volume", "Free space of the volume that all nodes share; an object store has none.",
        "bytes", Query(free, "{{persistentvolumeclaim}}"),
    )  # fmt: skip
    part = time_series(
        "Free share of the checkpoint volume", "The same as a share of its size.", "percentunit",
        Query(share(free, whole, "persistentvolumeclaim"), "{{persistentvolumeclaim}}"),
    )  # fmt: skip
    volumes = [panel.no_value(Need.KUBERNETES).span(6) for panel in (left, part.max(1))]
    disks = [panel.no_value(Need.NODE).span(6).max(1) for panel in (full, busy)]

    ports = ("instance", "device")
    cards = time_series(
        "Network", "Traffic of each network card; NCCL over sockets shows here.", "binBps",
        Query(rate("node_network_receive_bytes_total", _CARDS, *ports), "{{instance}} {{device}} in"),
        Query(rate("node_network_transmit_bytes_total", _CARDS, *ports), "{{instance}} {{device}} out"),
    )  # fmt: skip
    fabric = time_series(
        "InfiniBand", "Traffic of each InfiniBand or RoCE port.", "binBps",
        Query(rate("node_infiniband_port_data_received_bytes_total", _NODES, *ports), "{{instance}} {{device}} in"),
        Query(rate("node_infiniband_port_data_transmitted_bytes_total", _NODES, *ports), "{{instance}} {{device}} out"),
    )  # fmt: skip

    kernel = time_series(
        "Out-of-memory kills", "Processes that each node's kernel has killed because memory ran out.", "none",
        Query(f"max by (instance) (increase(node_vmstat_oom_kill{{{_NODES}}}[$__rate_interval]))", "{{instance}}"),
    )  # fmt: skip
    restarts = "max by (pod, container) (increase(kube_pod_container_status_restarts_total[$__rate_interval]))"
    reason = 'max by (pod, container) (kube_pod_container_status_last_terminated_reason{reason="OOMKilled"})'
    pods = time_series(
        "Containers over their limit", "Restarts of containers that were last killed because memory ran out.", "none",
        Query(f"{restarts} * on (pod, container) group_left () {reason}", "{{pod}} {{container}}"),
    )  # fmt: skip
    objects = time_series(
        "Ray's object store",
        "Objects that Ray's nodes keep, by location: checkpoints in transit and copies of a gang's state.", "bytes",
        Query("sum by (Location) (ray_object_store_memory)", "{{Location}}"),
        Query('sum by (Name) (ray_resources{Name="object_store_memory"})', "all that there is of {{Name}}"),
    )  # fmt: skip
    memory = [
        counted(kernel.no_value(Need.NODE)),
        counted(pods.no_value(Need.KUBERNETES)),
        stepped(objects.no_value(Need.RAY)),
    ]

    says = "Disks, networks and memory of the nodes, and the checkpoint volume."
    networks = [panel.no_value(Need.NODE).span(12) for panel in (cards, fabric)]
    rows = [Row("Storage", [*volumes, *disks]), Row("Networks", networks), Row("Memory", memory)]
    # Some machines or all, as Prometheus calls node_exporter's targets.
    instances = TextBoxVariable("instance").label("Nodes (regular expression)").default_value(".*")
    return frame("boost-nodes", "Boost / Nodes", says, rows).with_variable(instances).link(to_service())
