"""What becomes of an embedded Ray, and of calls to it, when its GCS hangs or has died."""

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

_STOPPED = """
import sys
import time
from pathlib import Path
import psutil
from service.gang import ray_gangs, ray_private
from service.gang.ray_gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]))
gangs.connect()
ray_gangs.ANSWER_SECONDS = ray_private.ANSWER_SECONDS = 0.5
calls = [gangs.check, gangs.nodes, gangs.alive, gangs.refused, lambda: gangs.request_nodes([])]
for call in calls:
    call()
gcs = next(process for process in psutil.Process().children(recursive=True) if process.name() == "gcs_server")
gcs.suspend()
for call in calls:
    begun = time.monotonic()
    try:
        call()
    except ConnectionError as error:
        print(error, time.monotonic() - begun < 10)
gcs.resume()
gangs.check()
print(len(gangs.nodes()))
gangs.close()
"""


def test_a_gcs_that_hangs_is_waited_for_no_longer_than_it_may_take(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [*["Ray's head does not answer True"] * 5, "1"], done.stderr[-3000:]


def test_a_gcs_that_dies_is_noticed_and_nothing_is_left_of_its_ray(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == ["the embedded Ray's GCS has ended", "[] False", "1"], done.stderr[-3000:]
