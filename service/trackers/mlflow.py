"""A run on an MLflow server, through its REST API.

A server may have accepted a request whose answer was lost. So each request that adds points sets a tag to the newest of
their events, which is read before more is sent; and the points of an event are always the same, so that
a server with a database keeps only one of them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from math import isfinite
from typing import Any

import httpx

from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.trackers.curves import LARGEST_ANSWER, Batch, ask, client_of, settings_of

_POINTS = 997  # per request; with the tags of their event, the job's group and its tags 1000, MLflow's limit
_PARAMETERS = 100
_LONGEST_VALUE = 500  # characters of a parameter or a tag, for the sake of old servers

_JOB, _EVENT = "boost.job", "boost.event"  # tags of a run
_ABSENT: dict[str, Any] = {}  # in place of an answer
_ENDED = {JobState.SUCCEEDED: "FINISHED", JobState.FAILED: "FAILED", JobState.CANCELLED: "KILLED"}
_WAITS = dict.fromkeys((JobState.QUEUED, JobState.SCHEDULING, JobState.PAUSED), "SCHEDULED")
_STATUS = {**_WAITS, JobState.RUNNING: "RUNNING", **_ENDED}


class MlflowRefused(RuntimeError):
    """The server refused a request."""


class Mlflow:
    """Logs a job's run.

    Args:
        tracking_uri: URL of the server.
        experiment: Name of the experiment that the run is in.
        credentials: ``token``, or ``username`` and ``password``, if the server requires them.
        page: URL of the job's page; ``None`` if there is none.
    """

    def __init__(self, tracking_uri: str, experiment: str, credentials: Mapping[str, str], page: str | None) -> None:
        self._uri, self._experiment, self._page = tracking_uri.rstrip("/"), experiment, page
        self._headers, self._auth = {}, None
        if "token" in credentials:
            self._headers["Authorization"] = f"Bearer {credentials['token']}"
        elif "username" in credentials:
            self._auth = httpx.BasicAuth(credentials["username"], credentials.get("password", ""))

    def send(self, batch: Batch, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Log a batch's points and the run's status.

        Raises:
            ConnectionError: The server cannot be reached, or does not answer.
            MlflowRefused: The server refused a request.
        """
        try:
            self._http = client_of(f"{self._uri}/api/2.0/mlflow/", headers=self._headers, auth=self._auth)
        except ValueError as error:
            raise ConnectionError(f"{self._uri} cannot be reached: {error}") from error
        with self._http:
            run = self._run(batch.job, previous)
            run_id = run["info"]["run_id"]
            known = next((int(tag["value"]) for tag in run["data"].get("tags", []) if tag["key"] == _EVENT), 0)
            left = [entry for entry in batch.entries if entry.event_id > known]
            while left:
                # In order, as many as have points that fit into a request.
                points = accumulate(len(entry.values) for entry in left)
                fitting = max(1, sum(total <= _POINTS for total in points))
                part, left = left[:fitting], left[fitting:]
                # JSON has no such numbers; MLflow spells them out.
                spelled = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
                metrics = list[dict[str, Any]]()
                for entry in part:
                    at = {"timestamp": round(entry.time.timestamp() * 1000), "step": entry.step}
                    for name, value in entry.values.items():
                        metrics.append({"key": name, "value": value if isfinite(value) else spelled[str(value)], **at})
                spec, newest = batch.job.spec, str(part[-1].event_id)
                values = {_EVENT: newest, "boost.group": spec.group, "boost.tags": ", ".join(spec.tags)}
                tags = [{"key": key, "value": value} for key, value in values.items() if value]
                self._ask("POST", "runs/log-batch", json={"run_id": run_id, "metrics": metrics, "tags": tags})
            if states := [(entry, entry.state) for entry in batch.entries if entry.state is not None]:
                entry, state = states[-1]
                status: dict[str, Any] = {"run_id": run_id, "run_name": batch.job.name, "status": _STATUS[state]}
                if state in _ENDED:
                    status["end_time"] = round(entry.time.timestamp() * 1000)
                self._ask("POST", "runs/update", json=status)
                tag = {"run_id": run_id, "key": "boost.state", "value": (entry.text or "")[:_LONGEST_VALUE]}
                self._ask("POST", "runs/set-tag", json=tag)
            return {"run": run_id, "url": f"{self._uri}/#/experiments/{run['info']['experiment_id']}/runs/{run_id}"}

    def _run(self, job: JobRecord, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job's run, creating it if needed; that takes several requests, any of which may be the last."""
        if "run" in previous:
            known: dict[str, Any] = self._ask("GET", "runs/get", params={"run_id": previous["run"]})["run"]
            return known
        by_name = {"experiment_name": self._experiment}
        answer = self._ask("GET", "experiments/get-by-name", params=by_name, absent="RESOURCE_DOES_NOT_EXIST")
        if answer is _ABSENT:
            name = {"name": self._experiment}
            created = self._ask("POST", "experiments/create", json=name, absent="RESOURCE_ALREADY_EXISTS")
            answer = {"experiment": created} if created else self._ask("GET", "experiments/get-by-name", params=by_name)
        experiment_id = str(answer["experiment"]["experiment_id"])

        query = {"experiment_ids": [experiment_id], "filter": f"tags.`{_JOB}` = '{job.id}'", "max_results": 1}
        if runs := self._ask("POST", "runs/search", json=query).get("runs", []):
            run: dict[str, Any] = runs[0]
        else:
            tags = {_JOB: job.id, "boost.tenant": job.tenant, "boost.queue": job.queue, "mlflow.user": job.submitted_by}
            tags |= {"mlflow.source.name": self._page or "BOOST Service", "mlflow.source.type": "JOB"}
            if self._page:
                tags["mlflow.note.content"] = f"[{job.id}]({self._page})"
            named = [{"key": key, "value": value} for key, value in tags.items()]
            begun = round(job.submitted_at.timestamp() * 1000)
            content = {"experiment_id": experiment_id, "run_name": job.name, "start_time": begun, "tags": named}
            run = self._ask("POST", "runs/create", json=content)["run"]
        present = {parameter["key"] for parameter in run["data"].get("params", [])}
        shown = {key: str(value)[:_LONGEST_VALUE] for key, value in settings_of(job.spec).items()}
        missing = [{"key": key, "value": value} for key, value in shown.items() if key not in present]
        for start in range(0, len(missing), _PARAMETERS):
            params = {"run_id": run["info"]["run_id"], "params": missing[start : start + _PARAMETERS]}
            self._ask("POST", "runs/log-batch", json=params)
        return run

    def _ask(self, method: str, path: str, absent: str | None = None, **what: Any) -> dict[str, Any]:
        """Return the server's answer; ``_ABSENT`` itself if it is the error code ``absent``."""
        too_large = MlflowRefused(f"{self._uri} answers {path} with more than {LARGEST_ANSWER} bytes")
        response, content = ask(self._http, self._uri, too_large, method, path, **what)
        code, message = "", ""
        with suppress(ValueError):
            if isinstance(answer := json.loads(content or b"{}"), dict):
                if response.is_success:
                    return answer
                code, message = str(answer.get("error_code", "")), str(answer.get("message", ""))
        if code == absent:
            return _ABSENT
        raise MlflowRefused(f"{self._uri} answers {path} with {response.status_code} {code} {message}".rstrip())
