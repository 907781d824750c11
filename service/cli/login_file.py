"""The login of the command line: one file that only its owner can read."""

import stat
from pathlib import Path
from tempfile import NamedTemporaryFile

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_serializer

from service.cli.failures import BadInput

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Login(BaseModel):
    """A service and the API key for it."""

    model_config = ConfigDict(frozen=True)

    url: str
    api_key: SecretStr
    ca_file: Path | None = None

    @field_serializer("api_key", when_used="json")
    def _shown(self, key: SecretStr) -> str:
        return key.get_secret_value()

    def is_at(self, url: str) -> bool:
        """Whether the key is for the service at ``url``."""
        return self.url.rstrip("/") == url.rstrip("/")


def read_login(path: Path) -> Login | None:
    """Read the login file; ``None`` if there is none.

    Raises:
        BadInput: Other users can read the file, or ``boost login`` did not write it.
    """
    try:
        if path.stat().st_mode & _OTHERS:
            raise BadInput(f"{path} holds a key and other users can read it; restrict it: chmod 600 {path}")
        return Login.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        # Not pydantic's message, which would show the file's contents.
        raise BadInput(f"{path} is not what `boost login` writes, or cannot be read; sign in again") from None


def write_login(path: Path, login: Login) -> None:
    """Write the login file atomically, readable by its owner only.

    Raises:
        BadInput: The file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:  # created with mode 0600
            file.write(login.model_dump_json(indent=2).encode())
        Path(file.name).replace(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error}; name another file with BOOST_CONFIG") from error
