"""What is left of an embedded Ray when its GCS has died, and that another can be started."""

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
import time
from pathlib import Path
import psutil
from service.gang.ray_gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]))
gangs.connect()
gangs.check()
folder, started = Path(gangs._folder), psutil.Process().children(recursive=True)
next(process for process in started if process.name() == "gcs_server").kill()
time.sleep(1)
try:
    gangs.check()
except ConnectionError as error:
    print(error)
gangs.close()
_, alive = psutil.wait_procs(started, timeout=10)
print(alive, folder.exists())
gangs.connect()
gangs.check()
print(len(gangs.nodes()))
gangs.close()
"""


def test_a_gcs_that_dies_is_noticed_and_nothing_is_left_of_its_ray(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["the embedded Ray's GCS has ended", "[] False", "1"], done.stderr[-3000:]
