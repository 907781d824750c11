"""The API in a process of its own, over an empty record and without Ray: ``python -m tests.service.small_server HOME``.

It prints the port that it listens on, and it writes its log to stderr as the service does.
"""

import sys
from pathlib import Path

from service.api.app import create_app
from service.api.middleware.connections import raise_descriptor_limit
from service.api.server import ApiServer, listen
from service.jobs.database import migrate
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.logs import LogFormat, write_logs
from service.settings import Settings


def main() -> None:
    settings = Settings(home=Path(sys.argv[1]))
    write_logs(LogFormat.TEXT)
    raise_descriptor_limit()
    migrate(settings.database_url)
    listener = listen(settings.host, 0)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    ApiServer(create_app(JobStore(settings.database_url), settings, Outlook), settings).run([listener])


if __name__ == "__main__":
    main()
