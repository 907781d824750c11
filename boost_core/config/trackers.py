"""Trackers, which show a job's curves besides the service."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from boost_core.config.base import Config, ResourceName, spelled
from boost_core.config.parsing.urls import UNSHOWN

_SERVER = re.compile(r"https?://[^\s/?#@]+[^\s?#@]*")

ExperimentName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/ -]*$"),
    spelled("letters, digits, dots, underscores, slashes, spaces and hyphens"),
]

WandbName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    spelled("letters, digits, dots, underscores and hyphens"),
]


def server_url(value: str) -> str:
    """Return the address of a server without a trailing slash.

    Raises:
        ValueError: It is not a valid address. The error as shown never repeats the value, since people put passwords
            into URLs.
    """
    if not _SERVER.fullmatch(value):
        problem = (
            "an address begins with http:// or https:// and has no user, password, ? or #; a server's credentials "
            "belong in a named secret: set credentials instead"
        )
        raise PydanticCustomError(UNSHOWN, "{problem}", {"problem": problem})
    return value.rstrip("/")


ServerUrl = Annotated[str, Field(max_length=2000), AfterValidator(server_url)]


class MlflowConfig(Config):
    """A run on an MLflow server."""

    tracking_uri: ServerUrl | None = Field(None, description="Address of a server that requires no credentials.")
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with a server's tracking_uri and the credentials it requires.",
        validate_default=True,
    )
    experiment: ExperimentName = Field(
        "boost", description="The experiment that the run is in; created if it does not exist."
    )

    @field_validator("credentials")
    @classmethod
    def _one_server(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "tracking_uri" in info.data and (info.data["tracking_uri"] is None) == (value is None):
            raise ValueError(
                "give either tracking_uri or credentials, the name of a secret with its own tracking_uri, so that it "
                "is sent to no other server"
            )
        return value


class WandbConfig(Config):
    """A run in Weights & Biases."""

    mode: Literal["online", "offline"] = Field(
        "online",
        description="online: sent during training; offline: files next to the checkpoints, for `wandb sync`.",
    )
    project: WandbName = Field("boost", description="The project that the run is in; created if it does not exist.")
    entity: WandbName | None = Field(
        None, description="The team or user that owns the project. Default: the owner of the key."
    )
    tags: tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...] = Field(
        (), max_length=20, description="Tags of the run."
    )
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with an api_key and, for a server of your own, its base_url. Online only.",
        validate_default=True,
    )

    @field_validator("credentials")
    @classmethod
    def _online_alone(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "mode" in info.data and (info.data["mode"] == "online") == (value is None):
            raise ValueError(
                "mode=online needs credentials, the name of a secret with an api_key; mode=offline sends nothing, so "
                "leave credentials out"
            )
        return value


class TrackersConfig(Config):
    """Where a job's curves and state changes go besides the service."""

    tensorboard: bool | None = Field(
        None,
        description="Event files for TensorBoard, in the folder tensorboard next to the checkpoints. Default: the "
        "service's setting, which is true if TensorBoard is installed.",
    )
    mlflow: MlflowConfig | None = Field(None, description="A run on an MLflow server. Default: none.")
    wandb: WandbConfig | None = Field(None, description="A run in Weights & Biases. Default: none.")
