"""The service's settings: the only place where environment variables are read."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from boost_core.config.urls import refuse_unserved


def _under_home(template: str) -> Any:
    return Field(default_factory=lambda given: template.format(home=given.get("home", "")))


class Settings(BaseSettings):
    """What an operator may set, each as an environment variable: ``home`` is ``BOOST_HOME``.

    Raises:
        pydantic.ValidationError: A variable holds a value of the wrong kind.
    """

    model_config = SettingsConfigDict(env_prefix="BOOST_", frozen=True, hide_input_in_errors=True)

    home: Path = Field(Path("~/.boost"), validate_default=True, description="Folder for what the service keeps.")
    database_url: str = _under_home("sqlite:///{home}/boost.db")
    checkpoint_root: Annotated[str, AfterValidator(refuse_unserved)] = _under_home("file://{home}/checkpoints")
    host: str = Field("127.0.0.1", description="Address that the API listens on.")
    port: int = Field(8900, ge=1, le=65_535)
    ray_address: str | None = Field(None, description="Ray cluster to run gangs on; none: an embedded one.")
    cpus: int | None = Field(None, ge=1, description="CPUs that the embedded Ray offers; none: all of the machine's.")
    reconcile_seconds: float = Field(0.5, gt=0, description="Seconds between two rounds of the scheduler.")
    grow_cooldown_seconds: float = Field(
        30.0, ge=0, description="A gang grows no sooner than so long after its shape has changed,"
    )
    grow_settle_seconds: float = Field(5.0, ge=0, description="and when there has been room for so long.")
    url: str = Field(
        default_factory=lambda given: f"http://{given.get('host')}:{given.get('port')}",
        description="Where the command line finds the service.",
    )
    api_key: SecretStr | None = Field(None, description="The key that the command line signs in with.")
    config: Path = Field(
        Path("~/.config/boost/login.json"),
        validate_default=True,
        description="File in which the command line keeps where it is signed in.",
    )
    retry_seconds: float = Field(
        3.0, ge=0, description="How long the command line goes on when the service does not answer or is too busy."
    )

    @property
    def names_service(self) -> bool:
        """Whether the environment says where the command line finds the service."""
        return not self.model_fields_set.isdisjoint({"url", "host", "port"})

    @field_validator("home", "config")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        # Gangs work in other folders, so a relative path would mean another place to them.
        return value.expanduser().absolute()
