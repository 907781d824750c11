"""The cluster's machines, as other exporters see them: disks, networks, memory, the checkpoint volume."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, TextBoxVariable

from deploy.grafana.source.panels import Need, Query, Row, counted, frame, share, stepped, time_series, to_service

_NODES = 'instance=~"$instance"'
_DISKS = f'{_NODES}, fstype!~"tmpfs|overlay|squashfs|ramfs"'
_CARDS = f'{_NODES}, device!~"lo|veth.*|cali.*|cilium.*|docker.*|cni.*|flannel.*"'


def nodes() -> Dashboard:
    """The dashboard."""
    says = "Disks, networks and memory of the nodes, and the checkpoint volume."
    board = frame("boost-nodes", "Boost / Nodes", says, [_storage(), _networks(), _memory()])
    # Some machines or all, as Prometheus calls node_exporter's targets.
    instances = TextBoxVariable("instance").label("Nodes (regular expression)").default_value(".*")
    return board.with_variable(instances).link(to_service())


def _storage() -> Row:
    full = _of_node(
        "Disks",
        "Used share of each file system; Ray writes its logs and what does not fit into memory there.",
        "percentunit",
        Query(
            f"1 - min by (instance, mountpoint) (node_filesystem_avail_bytes{{{_DISKS}}} "
            f"/ node_filesystem_size_bytes{{{_DISKS}}})",
            "{{instance}} {{mountpoint}}",
        ),
    )
    busy = _of_node(
        "Disks at work",
        "Share of time in which a disk was busy.",
        "percentunit",
        Query(
            f"max by (instance, device) (rate(node_disk_io_time_seconds_total{{{_NODES}}}[$__rate_interval]))",
            "{{instance}} {{device}}",
        ),
    )
    free, whole = (
        f"min by (persistentvolumeclaim) (kubelet_volume_stats_{what}_bytes)" for what in ("available", "capacity")
    )
    left = time_series(
        "Free on the checkpoint volume",
        "Free space of the volume that all nodes share; an object store has none.",
        "bytes",
        Query(free, "{{persistentvolumeclaim}}"),
    )
    part = time_series(
        "Free share of the checkpoint volume",
        "The same as a share of its size.",
        "percentunit",
        Query(share(free, whole, "persistentvolumeclaim"), "{{persistentvolumeclaim}}"),
    )
    volumes = [panel.no_value(Need.KUBERNETES) for panel in (left, part.max(1))]
    return Row("Storage", [panel.span(6) for panel in (*volumes, full.max(1), busy.max(1))])


def _networks() -> Row:
    cards = _of_node(
        "Network",
        "Traffic of each network card; NCCL over sockets shows here.",
        "binBps",
        Query(_per_second("node_network_receive_bytes_total", _CARDS), "{{instance}} {{device}} in"),
        Query(_per_second("node_network_transmit_bytes_total", _CARDS), "{{instance}} {{device}} out"),
    )
    fabric = _of_node(
        "InfiniBand",
        "Traffic of each InfiniBand or RoCE port.",
        "binBps",
        Query(_per_second("node_infiniband_port_data_received_bytes_total", _NODES), "{{instance}} {{device}} in"),
        Query(_per_second("node_infiniband_port_data_transmitted_bytes_total", _NODES), "{{instance}} {{device}} out"),
    )
    return Row("Networks", [cards.span(12), fabric.span(12)])


def _memory() -> Row:
    kernel = _of_node(
        "Out-of-memory kills",
        "Processes that each node's kernel has killed because memory ran out.",
        "none",
        Query(
            f"max by (instance) (increase(node_vmstat_oom_kill{{{_NODES}}}[$__rate_interval]))",
            "{{instance}}",
        ),
    )
    restarts = "max by (pod, container) (increase(kube_pod_container_status_restarts_total[$__rate_interval]))"
    reason = 'max by (pod, container) (kube_pod_container_status_last_terminated_reason{reason="OOMKilled"})'
    pods = time_series(
        "Containers over their limit",
        "Restarts of containers that were last killed because memory ran out.",
        "none",
        Query(f"{restarts} * on (pod, container) group_left () {reason}", "{{pod}} {{container}}"),
    )
    objects = time_series(
        "Ray's object store",
        "Objects that Ray's nodes keep, by location: checkpoints in transit and copies of a gang's state.",
        "bytes",
        Query("sum by (Location) (ray_object_store_memory)", "{{Location}}"),
        Query('sum by (Name) (ray_resources{Name="object_store_memory"})', "all that there is of {{Name}}"),
    )
    return Row(
        "Memory", [counted(kernel), counted(pods.no_value(Need.KUBERNETES)), stepped(objects.no_value(Need.RAY))]
    )


def _of_node(title: str, says: str, unit: str, *queries: Query) -> timeseries.Panel:
    return time_series(title, says, unit, *queries).no_value(Need.NODE)


def _per_second(metric: str, where: str) -> str:
    return f"sum by (instance, device) (rate({metric}{{{where}}}[$__rate_interval]))"
