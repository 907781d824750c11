"""The machines under the cluster, as other exporters see them: disks, networks, memory, the volume of checkpoints."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.source import links, variables
from deploy.grafana.source.frame import Row, frame
from deploy.grafana.source.graphs import counted, stepped, time_series
from deploy.grafana.source.panels import Need, Query
from deploy.grafana.source.promql import share

_NODES = 'instance=~"$instance"'
_DISKS = f'{_NODES}, fstype!~"tmpfs|overlay|squashfs|ramfs"'
_CARDS = f'{_NODES}, device!~"lo|veth.*|cali.*|cilium.*|docker.*|cni.*|flannel.*"'


def nodes() -> Dashboard:
    """The dashboard."""
    says = "Disks, networks and memory of the nodes, and the volume of checkpoints."
    board = frame("boost-nodes", "Boost / Nodes", says, [_storage(), _networks(), _memory()])
    return board.with_variable(variables.instances()).link(links.to_service())


def _storage() -> Row:
    full = _of_node(
        "Disks",
        "Part of each file system that is used; Ray writes its logs and what does not fit into memory there.",
        "percentunit",
        Query(
            f"1 - min by (instance, mountpoint) (node_filesystem_avail_bytes{{{_DISKS}}} "
            f"/ node_filesystem_size_bytes{{{_DISKS}}})",
            "{{instance}} {{mountpoint}}",
        ),
    )
    busy = _of_node(
        "Disks at work",
        "Part of the time in which a disk had something to do.",
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
        "Free on the volume of checkpoints",
        "What is left of the volume that all nodes share; a store of objects has none.",
        "bytes",
        Query(free, "{{persistentvolumeclaim}}"),
    )
    part = time_series(
        "Free part of the volume of checkpoints",
        "The same in parts of its size.",
        "percentunit",
        Query(share(free, whole, "persistentvolumeclaim"), "{{persistentvolumeclaim}}"),
    )
    volumes = [panel.no_value(Need.KUBERNETES) for panel in (left, part.max(1))]
    return Row("Storage", [panel.span(6) for panel in (*volumes, full.max(1), busy.max(1))])


def _networks() -> Row:
    cards = _of_node(
        "Network",
        "What each network card receives and sends; NCCL over sockets is seen here.",
        "binBps",
        Query(_per_second("node_network_receive_bytes_total", _CARDS), "{{instance}} {{device}} in"),
        Query(_per_second("node_network_transmit_bytes_total", _CARDS), "{{instance}} {{device}} out"),
    )
    fabric = _of_node(
        "InfiniBand",
        "What each port of InfiniBand or RoCE receives and sends.",
        "binBps",
        Query(_per_second("node_infiniband_port_data_received_bytes_total", _NODES), "{{instance}} {{device}} in"),
        Query(_per_second("node_infiniband_port_data_transmitted_bytes_total", _NODES), "{{instance}} {{device}} out"),
    )
    return Row("Networks", [cards.span(12), fabric.span(12)])


def _memory() -> Row:
    kernel = _of_node(
        "Kills for want of memory",
        "Processes that the kernel of each node has ended at that time for want of memory.",
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
        "Restarts at that time of containers whose last end was for want of memory.",
        "none",
        Query(f"{restarts} * on (pod, container) group_left () {reason}", "{{pod}} {{container}}"),
    )
    objects = time_series(
        "Ray's object store",
        "What Ray's nodes keep as objects, by where: checkpoints on their way and copies of a gang's state.",
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
