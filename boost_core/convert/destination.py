"""Where an exported model goes: a folder, S3, a hub. It is written to a local folder, and shows when it is whole."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from boost_core.config.parsing.urls import refuse_unserved


class HubRefused(OSError):
    """A hub is away, or does not take a model."""


class Destination:
    """A folder or S3 prefix that is to hold a model.

    Args:
        url: A path, ``file://`` or ``s3://``; nothing is there yet.

    Raises:
        ValueError: It is of another form, or something is there.
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
            needed: Bytes that the model takes.

        Raises:
            OSError: There is not so much room.
        """
        parent = Path(tempfile.gettempdir())
        if self._is_local:  # in the folder that is there, which may be a file system of its own, or beside the new one
            parent = Path(self._path) if self._filesystem.exists(self._path) else Path(self._path).parent
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise OSError(
                f"{parent} has {free / 1e9:,.3f} GB free and the export takes {needed / 1e9:,.3f} GB; make room"
            )
        folder = Path(tempfile.mkdtemp(prefix=".export-", dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, folder: Path) -> Path:
        """Have a staged model show at its destination; returns a local folder that has it."""
        if self._is_local and not self._filesystem.exists(self._path):
            folder.chmod(0o755)  # a temporary folder is for its owner alone
            return folder.rename(self._path)
        # What says that there is a model comes last.
        for file in sorted(folder.iterdir(), key=lambda path: path.name == "config.json"):
            if self._is_local:
                file.rename(f"{self._path}/{file.name}")
            else:
                self._filesystem.put_file(str(file), f"{self._path}/{file.name}")
        return Path(self._path) if self._is_local else folder


class Hub:
    """A repository of a hub with Hugging Face's protocol; address and token are as ``huggingface_hub`` finds them.

    Args:
        repository: Its name, such as ``team/model``. One that is not there is made, for its owner's eyes alone.

    Raises:
        HubRefused: The hub is away, or does not let us write to it.
        ValueError: That is not a name.
    """

    def __init__(self, repository: str) -> None:
        self._api = HfApi(library_name="boost-service")
        with self._in_words(repository):
            self.repository = self._api.create_repo(repository, private=True, exist_ok=True).repo_id

    def push(self, folder: Path, message: str) -> str:
        """Upload a model; returns the commit's address.

        Raises:
            HubRefused: The hub is away, or does not take it.
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
        except Exception as error:  # of the HTTP library underneath, which is another in each of its versions
            raise HubRefused(f"the hub at {self._api.endpoint} does not answer: {error}; try again later") from error
