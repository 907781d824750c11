"""The tutorial, as it stands: each of its commands is run, in order, as a reader would."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.service.serving import BOOST, Server, short_folder
from tests.used import ROOT

pytestmark = pytest.mark.nightly

PAGE = (ROOT / "docs/tutorial.md").read_text()
BLOCKS = re.findall(r"^```sh(.*?)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_each_command_does_what_the_page_says(tmp_path: Path) -> None:
    assert [block for title, block in BLOCKS if title] == ["boost serve --no-auth\n"]
    setup, *blocks = [block for title, block in BLOCKS if not title]
    assert setup.startswith("make setup\n") and len(blocks) > 8
    script = "".join(blocks)
    assert "job-..." not in script, "a reader would have to copy an ID"
    with short_folder() as folder:  # Ray puts sockets there
        server = Server(tmp_path / "home", BOOST_AUTH="false", TMPDIR=folder)
        try:
            server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
            environment = {
                **os.environ,
                "BOOST_URL": server.url,
                "HOME": str(tmp_path),
                "PATH": f"{Path(BOOST).parent}:{os.environ['PATH']}",
            }
            with (tmp_path / "printed").open("w") as printed:
                ended = subprocess.run(
                    ["bash", "-euxo", "pipefail", "-c", script],
                    cwd=tmp_path,
                    env=environment,
                    stdout=printed,
                    stderr=subprocess.STDOUT,
                )
        finally:
            server.end(signal.SIGTERM)
    text = (tmp_path / "printed").read_text()
    assert ended.returncode == 0, text[-10_000:]
    assert re.search(r"kill_rank|worker", text)
    assert "optimizer.learning_rate" in text and "acc" in text
    assert (tmp_path / "model" / "config.json").exists()
