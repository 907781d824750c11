"""A process that logs one batch with Weights & Biases' own package, and ends.

``python -m service.trackers.wandb_process``. The package starts a server, installs handlers and blocks at
will, none of which the service's process can afford. What to log comes as JSON on stdin; the result is JSON on the
last line of stdout.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, TypedDict

INIT_SECONDS, FINISH_SECONDS = 30.0, 30.0
PROCESS_SECONDS = 120  # for both, and for Python and the package to start on a busy machine

# None of the service's own variables: those of the database and the stores contain passwords.
_PASSED_ON = {
    "PATH", "PYTHONPATH", "LANG", "TMPDIR", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY",
}  # fmt: skip


class Given(TypedDict):
    """What to log.

    Attributes:
        settings: Settings of the package, besides the fixed ones.
        run: Arguments of ``wandb.init``.
        rows: Event IDs, increasing, each with the values to log.
        summary: Further fields of the run's summary.
        exit_code: Exit code of the run, if it has ended.
    """

    settings: dict[str, Any]
    run: dict[str, Any]
    rows: list[tuple[int, dict[str, float]]]
    summary: dict[str, str]
    exit_code: int | None


class Made(TypedDict):
    """The result: the run's page, and its file."""

    url: str | None
    file: str


def environment(folder: str) -> dict[str, str]:
    """Return the process's environment: part of this one's, with its folder as its home."""
    return {name: value for name, value in os.environ.items() if name.upper() in _PASSED_ON} | {"HOME": folder}


def main() -> None:
    """Log what is on stdin; an exception ends the process with its message in the last line of stderr."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    os.nice(10)  # the service, which answers requests, comes first
    given: Given = json.load(sys.stdin)
    folder = Path.cwd()
    _set_environment(folder)
    made = _log(given, folder)
    sys.stdout.write(f"\n{json.dumps(made)}\n")


def _end_with(service: int) -> None:
    """Exit when the service does: the next one sends the batch again."""
    while os.getppid() == service:
        time.sleep(0.2)
    os._exit(1)


def _set_environment(folder: Path) -> None:
    """Hide the operator's own use of the package from it, keep all files in the folder, and disable error reporting."""
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ[f"WANDB_{name}_DIR"] = str(folder)
    os.environ["WANDB_ERROR_REPORTING"] = "false"


def _log(given: Given, folder: Path) -> Made:
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    settings = wandb.Settings(
        root_dir=str(folder),
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        x_update_finish_state=given["exit_code"] is not None,
        init_timeout=INIT_SECONDS,
        finish_timeout=FINISH_SECONDS,
        finish_timeout_raises=True,
        **given["settings"],
    )
    run = wandb.init(**given["run"], resume="allow", settings=settings)
    # The run's own step counts events, each of which is logged once; curves are drawn over the job's step.
    run.define_metric("*", step_metric="step")
    for event_id, row in given["rows"]:
        run.log(row, step=event_id)
    run.summary.update(given["summary"])
    run.finish(exit_code=given["exit_code"] or 0)
    file = next(folder.glob("wandb/*/*.wandb"))  # the only one, though a link leads to it as well
    return {"url": run.url, "file": str(file)}


if __name__ == "__main__":
    main()
