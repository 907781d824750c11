"""What a gang that trains can be asked to do besides training. Its ``kind`` tells one from another."""

from boost_core.config.drill import Drill
from boost_core.config.profile import Profile

WorkerCommand = Drill | Profile
