"""The service's settings: the only place where environment variables are read."""

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from boost_core.config.base import refuse_unserved
from service.logs import LogFormat
from service.security.access import Access, AccessRules


def _absolute_prefix(value: str) -> str:
    if not value.startswith("hf://datasets/"):
        refuse_unserved(value)
    if not value.startswith(("/", "file:///", "s3://", "hf://")):
        raise ValueError("a prefix is an absolute path, or a URL that begins with file:///, s3:// or hf://datasets/")
    if not set(re.findall(r"\{.*?\}", value)) <= {"{tenant}"}:
        raise ValueError("a prefix may hold {tenant}, and no other braces")
    return value


def _ports(value: str) -> str:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value)
    if value and not (match and 1 <= int(match[1]) <= int(match[2]) <= 65_535):
        raise ValueError("a range of ports is two numbers from 1 to 65535, the smaller first, such as 9400-9499")
    return value


def _web_address(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s?#]+", value):
        raise ValueError("an address begins with http:// or https://, and has neither ? nor #")
    return value.rstrip("/")


Place = Annotated[str, AfterValidator(refuse_unserved)]
Prefix = Annotated[str, AfterValidator(_absolute_prefix)]
WebAddress = Annotated[str, AfterValidator(_web_address)]
NONE_IF_EMPTY = ("allowed_prefixes", "tracking_uris")


class Settings(BaseSettings):
    """Operator settings, each an environment variable: ``home`` is ``BOOST_HOME``; lists are comma-separated.

    Attributes:
        home: Folder for the service's own files.
        database_url: URL of the database.
        checkpoint_root: Where jobs store checkpoints that name no place.
        allowed_prefixes: Where jobs' data and checkpoints may be: folders or URLs, separated by commas or as a JSON
            list; {tenant} stands for the job's. None: anywhere, and with authentication only under
            checkpoint_root/{tenant}.
        database_seconds: How long a request or the scheduler waits for the database, each for a connection, a lock and
            a statement of PostgreSQL; a list or a job is answered with 503 after twice as long at the latest.
        secrets_dir: Folder <tenant>/<name>/ of the secrets that jobs name as credentials, the same on all nodes.
        host: Address that the API listens on.
        port: Its port.
        auth: Whether requests need an API key; without one, only this machine may connect.
        tls: False: TLS is terminated by a proxy in front of the service.
        tls_cert: PEM file with the API's certificate and its chain.
        tls_key: PEM file with that certificate's private key.
        trusted_proxies: Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted.
        cors_origins: Origins such as https://lab.example.org whose pages may call the API with a key.
        rate_per_second: Requests per second allowed per key, or per address without a key, averaged over 10 s.
        failed_logins_per_minute: Requests with a wrong key allowed per address.
        streams_per_key: Open event streams allowed per key.
        connections: Open connections allowed, at most half of them from one address.
        store_seconds: How long a request waits for the stores and files it looks at.
        tensorboard: Whether event files for TensorBoard are written next to the checkpoints of jobs that do not set it;
            none: where TensorBoard is installed.
        tracking_uris: MLflow servers that jobs may name, separated by commas; none: any, and with authentication only
            that of a secret.
        ray_address: Ray cluster to run gangs on; none: an embedded one.
        ray_token_file: File with the token of the Ray cluster; created for an embedded Ray.
        ray_dashboard_url: Public URL of the Ray cluster's dashboard, which the web page then links to.
        public_url: Public URL of the web page, which Ray's dashboard then links to.
        cpus: CPUs of the embedded Ray; none: all of the machine's.
        rank_metrics_ports: Ports on which a node's ranks serve their metrics, each on the first free one; empty: none.
        gpu_hour_price: Price of a GPU-hour for the plans of jobs, in any currency; none: no prices.
        dataset_cpus: CPUs of the cluster for building datasets, one dataset at a time.
        reconcile_seconds: Seconds between scheduler passes.
        supervisor_seconds: How long a gang's supervisor may not answer before it is ended and its job gets another
            gang.
        grow_cooldown_seconds: A gang grows at the earliest this long after its layout has changed.
        grow_settle_seconds: It grows once there has been room for this long.
        topology_labels: Labels that say which nodes are near each other, outermost first: a gang starts and grows on
            nodes that share the innermost label, if there is room for all of it.
        autoscaling: Whether to ask the Ray cluster's autoscaler for the nodes that waiting jobs need.
        log_format: How the service and its gangs write their logs.
        otlp_endpoint: URL of an OpenTelemetry collector for OTLP over HTTP, such as http://collector:4318; none: no
            tracing.
        url: URL of the service for the command line.
        api_key: API key of the command line.
        config: File in which the command line keeps its login.
        retry_seconds: How long the command line retries when the service does not answer or is too busy.

    Raises:
        pydantic.ValidationError: A variable has an invalid value.
    """

    model_config = SettingsConfigDict(env_prefix="BOOST_", frozen=True, hide_input_in_errors=True)

    home: Path = Path("~/.boost")
    database_url: str = Field(default_factory=lambda values: f"sqlite:///{values.get('home', '')}/boost.db")
    checkpoint_root: Place = Field(default_factory=lambda values: f"file://{values.get('home', '')}/checkpoints")
    allowed_prefixes: Annotated[tuple[Prefix, ...] | None, NoDecode] = None
    database_seconds: float = Field(10.0, gt=0, le=600)
    secrets_dir: Path = Field(default_factory=lambda values: values.get("home", Path()) / "secrets")
    host: str = "127.0.0.1"
    port: int = Field(8900, ge=1, le=65_535)
    auth: bool = True
    tls: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    rate_per_second: int = Field(50, ge=1)
    failed_logins_per_minute: int = Field(20, ge=1)
    streams_per_key: int = Field(50, ge=1)
    connections: int = Field(4000, ge=2)
    store_seconds: float = Field(30.0, gt=0)
    tensorboard: bool | None = None
    tracking_uris: Annotated[tuple[WebAddress, ...] | None, NoDecode] = None
    ray_address: str | None = None
    ray_token_file: Path = Field(default_factory=lambda values: values.get("home", Path()) / "ray-token")
    ray_dashboard_url: WebAddress | None = None
    public_url: WebAddress | None = None
    cpus: int | None = Field(None, ge=1)
    rank_metrics_ports: Annotated[str, AfterValidator(_ports)] = "9400-9499"
    gpu_hour_price: float | None = Field(None, ge=0, le=1e6)
    dataset_cpus: float = Field(2.0, ge=1)
    reconcile_seconds: float = Field(0.5, gt=0)
    supervisor_seconds: float = Field(60.0, ge=5)
    grow_cooldown_seconds: float = Field(30.0, ge=0)
    grow_settle_seconds: float = Field(5.0, ge=0)
    topology_labels: Annotated[tuple[str, ...], NoDecode] = ("ray.io/availability-region", "ray.io/availability-zone")
    autoscaling: bool = False
    log_format: LogFormat = LogFormat.TEXT
    otlp_endpoint: str | None = Field(None, pattern="^https?://")
    url: str = Field(
        default_factory=lambda values: (
            f"{'https' if values.get('tls_cert') else 'http'}://{values.get('host')}:{values.get('port')}"
        )
    )
    api_key: SecretStr | None = None
    config: Path = Path("~/.config/boost/login.json")
    retry_seconds: float = Field(3.0, ge=0)

    @field_validator("trusted_proxies", "cors_origins", "topology_labels", *NONE_IF_EMPTY, mode="before")
    @classmethod
    def _listed(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            if info.field_name == "allowed_prefixes" and value.lstrip().startswith("["):
                return json.loads(value)
            value = tuple(filter(None, map(str.strip, value.split(","))))
        return value or None if info.field_name in NONE_IF_EMPTY else value

    @field_validator("home", "secrets_dir", "config")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        # Gangs work in other folders, where a relative path would mean another place.
        return value.expanduser().absolute()

    def metrics_ports(self) -> range:
        """Return the ports on which ranks may serve metrics; empty: none."""
        if not self.rank_metrics_ports:
            return range(0)
        first, last = map(int, self.rank_metrics_ports.split("-"))
        return range(first, last + 1)

    def access(self, tenant: str, credentials: str | None) -> Access:
        """Return what a tenant may reach with one of its secrets, by name.

        Raises:
            SecretUnusable: The name cannot be that of a secret.
        """
        return AccessRules(str(self.secrets_dir), self.prefixes()).of(tenant, credentials)

    def prefixes(self) -> tuple[str, ...] | None:
        """Return where jobs' data and checkpoints may be; ``None``: anywhere."""
        if self.allowed_prefixes is None and not self.auth:
            return None
        # A tenant may name what the service itself has stored for it.
        return (*(self.allowed_prefixes or ()), f"{self.checkpoint_root.rstrip('/')}/{{tenant}}")
