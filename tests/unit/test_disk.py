"""A disk that is confined to some folders: nothing outside is seen, read, written or removed, whatever is swapped."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from boost_core.config.storage import Disk, confine
from tests.swapping import snapshot, swapping

SECRET = b"of another tenant"


@pytest.fixture
def others(tmp_path: Path) -> Path:
    folder = tmp_path / "others" / "data" / "below"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(SECRET)
    return tmp_path / "others"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "own" / "data" / "below"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"own")
    return tmp_path / "own"


@pytest.fixture
def disk(own: Path) -> Disk:
    return Disk(beneath=[str(own)])


def test_its_own_files_are_as_on_a_whole_disk(disk: Disk, own: Path) -> None:
    whole = Disk()
    assert type(fsspec.filesystem("file")) is Disk and type(fsspec.filesystem("local")) is Disk
    (own / "data" / "link").symlink_to("below/a")
    (own / "absolute").symlink_to(own / "data")
    for each in (disk, whole):
        base = f"{own}/{'confined' if each is disk else 'whole'}"
        each.makedirs(f"{base}/x/y")
        with pytest.raises(FileExistsError):
            each.makedirs(f"{base}/x/y")
        each.makedirs(f"{base}/x/y", exist_ok=True)
        each.pipe_file(f"{base}/x/y/1", b"12345")
        with each.open(f"{base}/x/y/1", "r+b") as stream:
            stream.seek(2)
            stream.write(b"x")
        with each.open(f"{base}/x/y/1", "ab") as stream:
            stream.write(b"6")
        each.mv(f"{base}/x/y/1", f"{base}/x/y/2")
        each.cp_file(f"{base}/x/y/2", f"{base}/x/3")
        each.rm_file(f"{base}/x/3")
        each.mkdir(f"{base}/gone/deep")
        each.rm(f"{base}/gone", recursive=True)
        assert each.cat_file(f"{base}/x/y/2") == b"12x456"
        assert each.find(base) == [f"{base}/x/y/2"]
        assert each.glob(f"{base}/*/*/?") == [f"{base}/x/y/2"]
    kept = ("name", "size", "type", "islink", "mtime", "ino")
    for path in (own, own / "data", own / "data/link", own / "absolute/below/a"):
        assert {key: disk.info(path)[key] for key in kept} == {key: whole.info(path)[key] for key in kept}
        assert disk.ls(path) == sorted(whole.ls(path))
    assert disk.find(str(own / "data"), detail=True).keys() == whole.find(str(own / "data"), detail=True).keys()
    assert disk.cat_file(f"{own}/absolute/link") == b"own"
    assert not disk.exists(f"{own}/nothing") and not disk.isdir(f"{own}/nothing")
    with pytest.raises(FileNotFoundError, match="nothing"):
        disk.open(f"{own}/nothing/at/all")


def test_a_folder_that_is_not_there_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "tenant"
    disk = Disk(beneath=[str(folder)])
    disk.makedirs(f"{folder}/job/step", exist_ok=True)
    assert (folder / "job" / "step").is_dir()
    with pytest.raises(PermissionError):
        disk.makedirs(f"{tmp_path}/root/other/job")
    assert [each.name for each in (tmp_path / "root").iterdir()] == ["tenant"]


def operations(disk: Disk, folder: str) -> dict[str, Callable[[], object]]:
    """What can be done with ``folder/below/a``; those that read return bytes or names."""
    file, below = f"{folder}/below/a", f"{folder}/below"
    return {
        "read": lambda: disk.cat_file(file),
        "list": lambda: disk.ls(below),
        "find": lambda: disk.find(folder),
        "glob": lambda: disk.glob(f"{folder}/*/a"),
        "look": lambda: disk.info(file)["ino"],
        "write": lambda: disk.pipe_file(file, b"mine"),
        "append": lambda: disk.open(file, "ab").write(b"mine"),
        "create": lambda: disk.pipe_file(f"{below}/b", b"mine"),
        "make": lambda: disk.makedirs(f"{below}/c", exist_ok=True),
        "rename": lambda: disk.mv(file, f"{below}/moved"),
        "copy": lambda: disk.cp_file(file, f"{below}/copied"),
        "remove": lambda: disk.rm_file(file),
        "clear": lambda: disk.rm(below, recursive=True),
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("how", ["link", "link above", "..", "absolute"])
@pytest.mark.parametrize("operation", operations(Disk(), ""))
def test_nothing_outside_is_reached(operation: str, how: str, disk: Disk, own: Path, others: Path) -> None:
    before = snapshot(others)
    (own / "linked").symlink_to(others / "data")
    (own / "above").symlink_to("../others")
    folder = {
        "link": f"{own}/linked",
        "link above": f"{own}/above/data",
        "..": f"{own}/data/../../others/data",
        "absolute": f"{others}/data",
    }[how]
    try:
        got = operations(disk, folder)[operation]()
    except OSError:
        got = []
    assert got in ([], None), got
    assert snapshot(others) == before


@pytest.mark.full
@pytest.mark.parametrize("swapped", ["data", "data/below"])
@pytest.mark.parametrize("operation", operations(Disk(), ""))
def test_nothing_outside_is_reached_while_a_folder_is_swapped(
    operation: str, swapped: str, disk: Disk, own: Path, others: Path
) -> None:
    before = snapshot(others)
    inode = (others / "data/below/a").stat().st_ino
    with swapping(own / swapped, others / swapped):
        for _ in range(150):
            with suppress(OSError):
                assert operations(disk, f"{own}/data")[operation]() not in (SECRET, inode)
            if operation in ("rename", "remove", "clear"):
                with suppress(OSError):
                    disk.makedirs(f"{own}/data/below", exist_ok=True)
                    disk.pipe_file(f"{own}/data/below/a", b"own")
    assert snapshot(others) == before
    if operation == "read":
        assert operations(disk, f"{own}/data")["read"]() == b"own"


def test_a_process_is_confined(own: Path, others: Path) -> None:
    try:
        confine([str(own)])
        with fsspec.open(f"file://{own}/data/below/a") as stream:
            assert stream.read() == b"own"
        with pytest.raises(PermissionError, match="leads outside of what this tenant may use"):
            fsspec.open(f"{others}/data/below/a").open()
        filesystem, path = fsspec.url_to_fs(f"{others}/data")
        assert not filesystem.exists(path)
    finally:
        confine(None)
    assert fsspec.filesystem("file").exists(str(others))
