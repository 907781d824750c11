"""Ray Train's storage, which is a job's own folder and takes nothing of Ray Train's."""

import pickle
from pathlib import Path

import pytest
from pyarrow.fs import PyFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.result import Result

from service.gang.ray_train.mirror import RunStorage
from service.security.access import Access
from service.security.secrets import SecretReference, SecretUnusable


def test_ray_train_leaves_nothing_in_the_folder_and_reads_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "step-00000008").mkdir()
    (tmp_path / "step-00000008" / "manifest.json").write_text("{}")
    files = PyFileSystem(RunStorage(str(tmp_path), Access()))
    storage = StorageContext(str(tmp_path), "", files)
    with files.open_output_stream(storage.checkpoint_manager_snapshot_path) as snapshot:
        snapshot.write(b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]
    with pytest.raises(RuntimeError, match="snapshot"):
        Result.from_path(str(tmp_path), files)
    with Checkpoint(storage.build_checkpoint_path_from_name("step-00000008"), files).as_directory() as copy:
        assert [path.name for path in Path(copy).iterdir()] == ["manifest.json"]


def test_a_folder_that_cannot_be_reached_does_not_matter_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file")
    StorageContext(str(tmp_path / "job"), "", PyFileSystem(RunStorage(str(tmp_path / "job"), Access())))


def test_the_secret_stays_where_it_is(tmp_path: Path) -> None:
    secret = tmp_path / "lab" / "store"
    secret.mkdir(parents=True)
    for name in ("access_key_id", "secret_access_key"):
        (secret / name).write_text("confidential-value")
    storage = RunStorage("s3://bucket/job", Access(SecretReference(str(tmp_path), "lab", "store")))
    sent, shown = pickle.dumps(PyFileSystem(storage)), repr(storage)
    assert b"confidential" not in sent
    assert storage.fs and repr(storage) == shown, "what is open has the secret, and is not shown"
    assert pickle.loads(sent) == PyFileSystem(storage)
    (secret / "access_key_id").unlink()
    with pytest.raises(SecretUnusable, match="no file access_key_id"):
        _ = pickle.loads(sent).handler.fs
