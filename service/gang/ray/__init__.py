"""Gangs on Ray: supervisors, replicas and the executor of a controller's decisions."""

import os

# Ray's client ends its process, without a word, when it finds that its raylet has gone. In Ray's own workers it knows
# the raylet's process; elsewhere a parent that is process 1, as under systemd or in a container, is a sign for it. Told
# this very process, it never finds it gone. Ray reads this once, as it is imported.
os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
