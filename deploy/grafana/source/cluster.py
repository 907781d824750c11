"""The cluster's dashboards: all jobs at a glance, the scheduler, checkpoints, and the machines.

They say whether the cluster is used, and used well, which jobs wait and why, what is saved of them, and what is wrong.
"""

from grafana_foundation_sdk.builders import statetimeline
from grafana_foundation_sdk.builders.dashboard import Dashboard, TextBoxVariable
from grafana_foundation_sdk.models.dashboard import ValueMap, ValueMappingResult

from deploy.grafana.source import panels
from deploy.grafana.source.panels import JOBS, NAMES, TENANTS, Column, Need, Row, bars, count, newest, plot, rate, total

_FIRING = 'ALERTS{alertname=~"Boost.*", alertstate="firing"}'
_QUEUED = newest("boost_queue_jobs", 'state!="RUNNING"', "queue", "state")

# Of machines, as node_exporter and others see them.
_NODES = 'instance=~"$instance"'
_DISKS = f'{_NODES}, fstype!~"tmpfs|overlay|squashfs|ramfs"'
_CARDS = f'{_NODES}, device!~"lo|veth.*|cali.*|cilium.*|docker.*|cni.*|flannel.*"'


def fleet() -> Dashboard:
    """All jobs and the cluster at a glance."""
    labels = {"alertname": "Alert", "severity": "Severity", **panels.OF_JOBS, "queue": "Queue", "rank": "Rank"}
    firing = Column("", "none", f"max by ({', '.join(labels)}) ({_FIRING})")
    says = "Firing alerts and what they are about; the runbook has a page for each."
    gpus, free = (newest("boost_cluster_resources", f'resource="GPU", condition="{of}"') for of in ("total", "free"))
    speed = total(newest("boost_job_tokens_per_second", TENANTS, "job_id"))
    failed, replicas = 'max(delta(boost_jobs{state="FAILED"}[$__range]))', 'sum(up{job="boost-api"})'
    longest = "Waiting time of the job that has waited longest."
    waited, draining = newest("boost_queue_oldest_wait_seconds"), newest("boost_cluster_nodes", 'condition="draining"')
    restarts = total(f"max by (job_id, cause) (increase(boost_job_restarts_total{{{TENANTS}}}[$__range]))")
    of_time = "Share of the jobs' time, without waiting, that went into new steps."
    goodput = count("Goodput", of_time, panels.goodput(TENANTS), "percentunit")
    now = [
        count("GPUs", "GPUs that the nodes have.", gpus),
        count("Free GPUs", "GPUs that no gang holds.", free),
        count("Running jobs", "Jobs that have a gang.", newest("boost_jobs", 'state="RUNNING"')),
        count("Waiting jobs", "Jobs that are queued or waiting for resources.", total(_QUEUED)),
        count("Tokens", "Tokens trained on per second, over all jobs.", speed, "si:tokens/s"),
        goodput.no_value("–").levels("red", yellow=0.5, green=0.7),
        count("Alerts", "Alerts that fire.", f"count({_FIRING}) or vector(0)").levels("green", red=1),
        count("Failed jobs", "Jobs that have failed within the selected time range.", failed)
        .decimals(0)
        .levels(yellow=1),
        count("Restarts", "How often jobs resumed after interruptions within the selected time range.", restarts)
        .decimals(0)
        .levels(yellow=1),
        count("Longest wait now", longest, waited, "s").levels(yellow=3600, red=86400),
        count("Draining nodes", "Nodes about to leave.", draining).levels(yellow=1),
        count("Replicas", "Processes of the API that Prometheus can reach.", replicas).levels("red", text=1),
        panels.table("Firing", says, labels, [firing]).height(5).no_value(Need.ALERT),
    ]

    columns = [
        Column("", "none", _of_jobs("info", TENANTS, "state", "queue", "family")),
        Column("Workers", "none", _of_jobs("workers", TENANTS)),
        Column("Done", "percentunit", f"{_of_jobs('step', TENANTS)} / {_of_jobs('target_steps', TENANTS)}"),
        Column("Loss", "suffix: nats", _of_jobs("loss_nats", TENANTS)),
        Column("Speed", "si:tokens/s", _of_jobs("tokens_per_second", TENANTS)),
        Column("Goodput", "percentunit", panels.goodput(TENANTS, *NAMES)),
        Column("Restarts", "none", total(_of_jobs("restarts_total", TENANTS, "cause"), *NAMES)),
        Column("Last step", "s", f"time() - {_of_jobs('progress_timestamp_seconds', TENANTS)}"),
    ]
    labels = {**panels.OF_JOBS, "state": "State", "queue": "Queue", "family": "Family"}
    jobs = panels.table("Jobs", "Each job that has not ended.", labels, columns)
    says = "Number of jobs in each state, except those that have ended."
    active = newest("boost_jobs", 'state!~"SUCCEEDED|FAILED|CANCELLED"', "state")
    states = plot("Jobs by state", says).of(active, "{{state}}")

    spent = total(_of_jobs("goodput_seconds", TENANTS, "kind"), "kind")
    before = newest("boost_job_restarts_total", TENANTS, *NAMES, "cause", offset=panels.EARLIER)
    training = [
        plot("Tokens by job", "Tokens trained on per second, over all jobs.", "si:tokens/s")
        .of(_of_jobs("tokens_per_second", TENANTS), "{{job_name}}")
        .stacked(),
        bars("Where the time went", "How the time of all jobs that have not ended was spent.", "s", spent, "{{kind}}"),
        plot("Restarts by cause", "How often jobs resumed after each kind of interruption.")
        .of(total(f"{_of_jobs('restarts_total', TENANTS, 'cause')} - {before}", "cause"), "{{cause}}")
        .counted(),
    ]

    cluster = [
        plot("GPUs by tenant", "GPUs that each tenant's gangs hold, and free GPUs.", "suffix: GPUs")
        .of(newest("boost_tenant_gpus_held", TENANTS, "tenant"), "{{tenant}}")
        .of(free, "free")
        .stacked(),
        plot("CPUs", "CPUs of all nodes, and free CPUs.", "suffix: CPUs")
        .of(newest("boost_cluster_resources", 'resource="CPU"', "condition"), "{{condition}}")
        .stepped(),
        plot("Nodes", "Nodes that stay, and nodes about to leave.")
        .of(newest("boost_cluster_nodes", "", "condition"), "{{condition}}")
        .stepped(),
    ]

    # What the time that is looked at has cost, by tenant and by queue: GPU-hours, and their price.
    use = []
    for of in ("tenant", "queue"):
        held, legend = newest(f"boost_{of}_gpus_held", TENANTS if of == "tenant" else "", of), f"{{{{{of}}}}}"
        hours = f"sum_over_time({held}[$__range:1m]) / 60"  # a value a minute, and none where nobody looked
        says = f"GPU-hours that the gangs of each {of} have held within the selected time range."
        use.append(bars(f"GPU-hours by {of}", says, "suffix: h", hours, legend))
        says = f"Their cost at the price of a GPU-hour set at the top, in its currency, for each {of}."
        use.append(bars(f"Cost by {of}", says, "none", f"{hours} * $gpu_hour_price", legend).decimals(2))

    api = [
        plot("Requests", "Requests answered per second, by route.", "reqps").of(
            rate("boost_http_requests_total", "", "method", "route"), "{{method}} {{route}}"
        ),
        plot("Refused and failed", "Requests answered with an error per second.", "reqps").of(
            rate("boost_http_requests_total", 'status=~"[45].."', "status"), "{{status}}"
        ),
        panels.quantiles("Duration", "Duration of requests, without streams.", "boost_http_request_duration_seconds"),
        plot("Streams", "Open event streams of each replica.")
        .of("max by (instance) (boost_http_streams)", "{{instance}}")
        .stepped(),
    ]

    rows = [
        Row("Now", now),
        Row("Jobs", [jobs, states.stepped(), *_queues()]),
        Row("Training", training),
        Row("Cluster", cluster),
        Row("Use", use, span=6),
        Row("API", api, span=6),
    ]
    board = panels.frame("Fleet", "All jobs, queues and machines at a glance.", rows, ["tenant"])
    # What a GPU costs in an hour, in whichever currency; the chart sets it.
    price = TextBoxVariable(panels.GPU_HOUR_PRICE).label("Price of a GPU-hour").default_value("0")
    return board.with_variable(price).annotation(panels.restarts(TENANTS)).link(panels.to_service())


def _of_jobs(metric: str, where: str, *by: str) -> str:
    return newest(f"boost_job_{metric}", where, *NAMES, *by)


def _queues() -> list[panels.Lines]:
    """How many jobs of each queue wait, and for how long."""
    waiting = plot("Jobs that wait", "Jobs of each queue that are queued or waiting for resources.")
    longest = plot("Longest wait", "Waiting time of the job that has waited longest in each queue.", "s")
    waits = newest("boost_queue_oldest_wait_seconds", "", "queue")
    return [waiting.of(total(_QUEUED, "queue"), "{{queue}}").stepped(), longest.of(waits, "{{queue}}")]


def scheduler() -> Dashboard:
    """The scheduler: whether it runs, how long its passes take, which jobs wait, and the use of limits."""
    says = "Number of replicas that hold the lease: one, or none for some seconds when it changes hands."
    failed = 'sum(increase(boost_scheduler_passes_total{outcome="failed"}[$__range]))'
    seen = f"time() - {newest('boost_cluster_seen_timestamp_seconds')}"
    # A band for each replica, whose colour says whether it schedules.
    words = {
        "0": ValueMappingResult("stands by", "semi-dark-blue"),
        "1": ValueMappingResult("schedules", "semi-dark-green"),
    }
    leading = statetimeline.Panel().title("Who schedules").description("Which replica holds the lease.")
    leading = leading.datasource(panels.PROMETHEUS).unit("none").mappings([ValueMap(words)]).tooltip(panels.TOOLTIP)
    leading = leading.with_target(panels.query("max by (instance) (boost_scheduler_leading)", "{{instance}}"))
    times = panels.quantiles("Duration", "Duration of a pass over all jobs.", "boost_scheduler_pass_duration_seconds")
    ended = rate("boost_scheduler_passes_total", "", "outcome")
    outcomes = plot("Passes", "Passes per second, by outcome.", "suffix: passes/s").of(ended, "{{outcome}}")
    passes = [
        count("Schedulers", says, "sum(boost_scheduler_leading)").levels("red", green=1, red=2),
        count("Failed passes", "Passes that failed within the selected time range.", failed)
        .decimals(0)
        .levels(yellow=1, red=10),
        count("Cluster seen", "Time since the scheduler last saw the cluster.", seen, "s").levels(yellow=30, red=120),
        leading.height(4).span(12),
        times.span(12),
        outcomes.span(12),
    ]

    of_queues = newest("boost_queue_jobs", 'state="RUNNING"', "queue")
    running = plot("Jobs that run", "Jobs of each queue that have a gang.").of(of_queues, "{{queue}}")
    waits = Column("Waits", "s", newest("boost_job_waiting_seconds", "", *NAMES))
    says = "Jobs that are queued or waiting for resources, and their waiting times."
    waiting = [*_queues(), running.stepped(), panels.table("Waiting jobs", says, panels.OF_JOBS, [waits])]

    limits = [
        plot(f"By {of}", f"GPUs that the gangs of each {of} hold, and its limit, if any.", "suffix: GPUs")
        .of(newest(f"boost_{of}_gpus_held", "", of), f"{{{{{of}}}}}")
        .of(newest(f"boost_{of}_gpus_limit", "", of), f"{{{{{of}}}}} limit")
        .stepped()
        for of in ("queue", "tenant")
    ]

    says = "Which replica schedules and how fast, which jobs wait, and how much of their limits queues and tenants use."
    rows = [Row("Passes", passes), Row("Waiting", waiting), Row("GPUs held", limits, span=12)]
    return panels.frame("Scheduler", says, rows).link(panels.to_service())


def checkpoints() -> Dashboard:
    """Checkpoints of all jobs: their age, size and duration, and whether the store accepts them."""
    size, seconds = _of_jobs("checkpoint_bytes", JOBS), _of_jobs("checkpoint_commit_seconds", JOBS)
    blocked = _of_jobs("checkpoint_seconds", JOBS)
    age = f"time() - {_of_jobs('checkpoint_timestamp_seconds', JOBS)}"
    at_risk = f"{_of_jobs('step', JOBS)} - {_of_jobs('checkpoint_step', JOBS)}"
    columns = [
        Column("Step", "locale", _of_jobs("checkpoint_step", JOBS)),
        Column("Age", "s", age),
        Column("Steps since", "locale", at_risk),
        Column("Size", "bytes", size),
        Column("Held training", "s", blocked),
        Column("Took to commit", "s", seconds),
    ]
    safe = [
        panels.table("Newest checkpoints", "Each job's newest checkpoint.", panels.OF_JOBS, columns),
        _each_job("Age", "Time since each job's newest checkpoint was committed.", "s", age),
        _each_job("Steps since", "Steps that are not in a checkpoint yet.", "locale", at_risk).stepped(),
    ]

    whole = total(newest("boost_job_goodput_seconds", JOBS, *NAMES, "kind"), *NAMES)
    spent = newest("boost_job_goodput_seconds", f'{JOBS}, kind="checkpoint"', *NAMES)
    says = "Share of each job's time for which checkpoints and copies blocked it."
    cost = [
        _each_job("Held training", "How long the newest checkpoint blocked the step loop.", "s", blocked),
        _each_job("Share of the job's time", says, "percentunit", panels.share(spent, whole, *NAMES)),
    ]

    says = "From the time training continued until the newest checkpoint was committed."
    speed = panels.share(size, f"({seconds} > 0)", *NAMES)
    faults = newest("boost_job_faults_total", f'{JOBS}, what="store"', *NAMES)
    refused = _each_job("Store faults", "How often saving was abandoned or had to wait for the store.", "none", faults)
    store = [
        _each_job("Time to commit", says, "s", seconds),
        _each_job("Speed", "Size of the newest checkpoint divided by the time to commit it.", "binBps", speed),
        _each_job("Size", "Size of the newest checkpoint.", "bytes", size).stepped(),
        refused.stepped(),
    ]

    says = "How much of each job is saved, what saving costs, and whether the store accepts it."
    rows = [Row("What is safe", safe), Row("What saving costs", cost), Row("The store", store)]
    board = panels.frame("Checkpoints", says, rows, ["tenant", "job_name"])
    return board.annotation(panels.restarts(JOBS)).link(panels.to_service())


def _each_job(title: str, says: str, unit: str, expr: str) -> panels.Lines:
    return plot(title, says, unit).of(expr, "{{job_name}} {{job_id}}").span(12)


def nodes() -> Dashboard:
    """The cluster's machines, as other exporters see them: disks, networks, memory, the checkpoint volume."""
    of_volume = "min by (persistentvolumeclaim) (kubelet_volume_stats_{}_bytes)".format
    free, whole, claim = of_volume("available"), of_volume("capacity"), "{{persistentvolumeclaim}}"
    left = "Free space of the volume that all nodes share; an object store has none."
    free_on_disk, size_of_disk = (f"node_filesystem_{what}_bytes{{{_DISKS}}}" for what in ("avail", "size"))
    busy = f"max by (instance, device) (rate(node_disk_io_time_seconds_total{{{_NODES}}}[$__rate_interval]))"
    used = "Used share of each file system; Ray writes its logs and what does not fit into memory there."
    storage = [
        plot("Free on the checkpoint volume", left, "bytes", Need.KUBERNETES).of(free, claim),
        plot("Free share of the checkpoint volume", "The same as a share of its size.", "percentunit")
        .of(panels.share(free, whole, "persistentvolumeclaim"), claim)
        .max(1)
        .no_value(Need.KUBERNETES),
        plot("Disks", used, "percentunit", Need.NODE)
        .of(f"1 - min by (instance, mountpoint) ({free_on_disk} / {size_of_disk})", "{{instance}} {{mountpoint}}")
        .max(1),
        plot("Disks at work", "Share of time in which a disk was busy.", "percentunit", Need.NODE)
        .of(busy, "{{instance}} {{device}}")
        .max(1),
    ]

    ports, port = ("instance", "device"), "{{instance}} {{device}}"
    networks = [
        plot("Network", "Traffic of each network card; NCCL over sockets shows here.", "binBps", Need.NODE)
        .of(rate("node_network_receive_bytes_total", _CARDS, *ports), f"{port} in")
        .of(rate("node_network_transmit_bytes_total", _CARDS, *ports), f"{port} out"),
        plot("InfiniBand", "Traffic of each InfiniBand or RoCE port.", "binBps", Need.NODE)
        .of(rate("node_infiniband_port_data_received_bytes_total", _NODES, *ports), f"{port} in")
        .of(rate("node_infiniband_port_data_transmitted_bytes_total", _NODES, *ports), f"{port} out"),
    ]

    restarts = "max by (pod, container) (increase(kube_pod_container_status_restarts_total[$__rate_interval]))"
    reason = 'max by (pod, container) (kube_pod_container_status_last_terminated_reason{reason="OOMKilled"})'
    says = "Objects that Ray's nodes keep, by location: checkpoints in transit and copies of a gang's state."
    memory = [
        plot("Out-of-memory kills", "Processes that each node's kernel has killed because memory ran out.")
        .of(f"max by (instance) (increase(node_vmstat_oom_kill{{{_NODES}}}[$__rate_interval]))", "{{instance}}")
        .no_value(Need.NODE)
        .counted(),
        plot("Containers over their limit", "Restarts of containers that were last killed because memory ran out.")
        .of(f"{restarts} * on (pod, container) group_left () {reason}", "{{pod}} {{container}}")
        .no_value(Need.KUBERNETES)
        .counted(),
        plot("Ray's object store", says, "bytes", Need.RAY)
        .of("sum by (Location) (ray_object_store_memory)", "{{Location}}")
        .of('sum by (Name) (ray_resources{Name="object_store_memory"})', "all that there is of {{Name}}")
        .stepped(),
    ]

    says = "Disks, networks and memory of the nodes, and the checkpoint volume."
    rows = [Row("Storage", storage, span=6), Row("Networks", networks, span=12), Row("Memory", memory)]
    # Some machines or all, as Prometheus calls node_exporter's targets.
    instances = TextBoxVariable("instance").label("Nodes (regular expression)").default_value(".*")
    return panels.frame("Nodes", says, rows).with_variable(instances).link(panels.to_service())
