"""Temporary folders are removed, also those that killed processes leave."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from boost_core.temporary import TemporaryFolder

HOLDER = """
import sys, time
from pathlib import Path
from boost_core.temporary import TemporaryFolder
print(TemporaryFolder("kind-", Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout
    left = Path(holder.stdout.readline().strip())
    with TemporaryFolder("kind-", tmp_path):
        assert left.exists(), "its process is running"
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    (tmp_path / "kind-file").write_text("no folder")
    (tmp_path / "other").mkdir()
    ended: list[Path] = []
    with TemporaryFolder("kind-", tmp_path, ended.append) as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, tmp_path / "kind-file", tmp_path / "other"])
    assert ended == [left]
    assert not folder.exists()


def test_a_renamed_folder_stays(tmp_path: Path) -> None:
    with TemporaryFolder("kind-", tmp_path) as folder:
        folder.rename(tmp_path / "kept")
    assert (tmp_path / "kept").is_dir()
