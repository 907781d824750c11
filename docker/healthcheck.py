"""Ends well if the service of this container answers. Whether it can schedule is another question: see /readyz."""

import httpx

from service.settings import Settings

settings = Settings()
scheme = "https" if settings.tls_cert else "http"
# The certificate is for the service's name, which is not what it is called from inside.
httpx.get(f"{scheme}://127.0.0.1:{settings.port}/healthz", verify=False, timeout=4).raise_for_status()
