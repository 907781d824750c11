"""Destinations of exported models: folders, S3 and hubs. Models are staged locally and appear once complete."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from boost_core.config.parsing.urls import refuse_unserved
from boost_core.temporary import TemporaryFolder


class HubRefused(OSError):
    """A hub is unavailable, or does not accept a model."""


class Destination:
    """A folder or S3 prefix for an exported model.

    Args:
        url: A path, ``file://`` or ``s3://`` URL at which nothing exists yet.

    Raises:
        ValueError: The URL has another form, or something exists there.
    """

    def __init__(self, url: str) -> None:
        self.url = refuse_unserved(url).rstrip("/")
        self._filesystem, self._path = fsspec.url_to_fs(self.url, use_listings_cache=False)
        self._is_local = self._filesystem.protocol[0] == "file"
        if self._filesystem.isfile(self._path):
            raise ValueError(f"{self.url} is a file; give a new folder")
        if self._filesystem.exists(self._path) and (there := self._filesystem.ls(self._path, detail=False)):
            raise ValueError(f"{self.url} is not empty (it has {Path(there[0]).name}); give a new folder")

    @contextmanager
    def staging(self, needed: int) -> Iterator[Path]:
        """A local folder to write the model to, removed at the end unless it has been published.

        Args:
            needed: Size of the model in bytes.

        Raises:
            OSError: There is not enough room.
        """
        parent = Path(tempfile.gettempdir())
        if self._is_local:  # in the existing folder, which may be a separate file system, or next to the new one
            parent = Path(self._path) if self._filesystem.exists(self._path) else Path(self._path).parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OSError(
                f"{parent} has {free / 1e9:,.3f} GB free and the export takes {needed / 1e9:,.3f} GB; make room"
            )
        with TemporaryFolder(".export-", parent) as folder:
            yield folder

    def publish(self, folder: Path) -> Path:
        """Make a staged model appear at its destination; return a local folder that contains it."""
        if self._is_local and not self._filesystem.exists(self._path):
            folder.chmod(0o755)  # temporary folders are readable by their owner only
            return folder.rename(self._path)
        # config.json, which marks the folder as a model, comes last.
        for file in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            if self._is_local:
                file.rename(f"{self._path}/{file.name}")
            else:
                self._filesystem.put_file(str(file), f"{self._path}/{file.name}")
        return Path(self._path) if self._is_local else folder


class Hub:
    """A repository on a hub with Hugging Face's protocol; ``huggingface_hub`` determines the address and token.

    Args:
        repository: Its name, such as ``team/model``. If it does not exist, it is created as a private one.

    Raises:
        HubRefused: The hub is unavailable, or does not allow writing to it.
        ValueError: The name is invalid.
    """

    def __init__(self, repository: str) -> None:
        self._api = HfApi(library_name="boost-service")
        with self._in_words(repository):
            self.repository = self._api.create_repo(repository, private=True, exist_ok=True).repo_id

    def push(self, folder: Path, message: str) -> str:
        """Upload a model; return the commit's URL.

        Raises:
            HubRefused: The hub is unavailable, or does not accept it.
        """
        with self._in_words(self.repository):
            pushed = self._api.upload_folder(repo_id=self.repository, folder_path=folder, commit_message=message)
        return str(pushed.commit_url)

    @contextmanager
    def _in_words(self, repository: str) -> Iterator[None]:
        try:
            yield
        except HFValidationError as error:
            raise ValueError(f"--push {repository}: {error}") from error
        except HfHubHTTPError as error:
            reason = " ".join((error.server_message or str(error)).split())
            raise HubRefused(f"the hub at {self._api.endpoint} refuses {repository}: {reason}") from error
        except Exception as error:  # from the underlying HTTP library, which differs between versions
            raise HubRefused(f"the hub at {self._api.endpoint} does not answer: {error}; try again later") from error
