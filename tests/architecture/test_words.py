"""Names that the code no longer uses."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOT_USED = {  # names that the code no longer has, and what replaces them
    "LateGradients": "DeferredWeightGradients",
    "catch_up": "flush",
    "settle_before": "flush_before",
    "sum_partials": "reduce_from_tp",
    "exchange_axes": "all_to_all",
    "Collectives": "Communicator",
    "forgetfully": "recomputed",
    "is_sent": "product_of_saved",
    "Shelf": "SnapshotStore",
    "shelf": "SnapshotStore",
    "Saving": "CheckpointManager",
    "go_back": "roll_back",
    "LossWatch": "DivergenceDetector",
    "Meeting": "Rendezvous",
    "Beat": "Heartbeat",
    "mute": "unresponsive",
    "shun": "quarantine",
    "Scene": "ClusterSnapshot",
    "Wish": "Bundles",
    "Deed": "AuditEvent",
    "Patience": "RetryPolicy",
    "use_everywhere": "Access.configure",
    "keep_quiet_about": "register_secrets",
    "expendable": "prunable",
    "KnownJobs": "JobCache",
    "heed": "account_for",
    "RoomSeen": "CapacityObserved",
    "Errand": "WorkerCommand",
    "errand": "command",
    "ROOM_NEEDED": "PREEMPTED",
    "held_out": "validation",
    "held_out_fraction": "validation_fraction",
}


def names(tree: ast.AST) -> set[str]:
    """All names that a file defines or uses."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
    return found


def test_the_code_has_none_of_the_old_names() -> None:
    files = [path for package in ("boost_core", "service") for path in (ROOT / package).rglob("*.py")]
    used = {str(path.relative_to(ROOT)): names(ast.parse(path.read_text())) & NOT_USED.keys() for path in files}
    assert not {file: {old: NOT_USED[old] for old in found} for file, found in used.items() if found}
