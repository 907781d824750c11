"""The proxy that the environment names for a URL, as curl would find it.

httpx finds it in its own way: it fails on ``NO_PROXY=[::1]`` and on networks of IPv6 addresses, which clusters with two
stacks have, and asks a proxy for this machine's own addresses.
"""

from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from urllib.request import getproxies, proxy_bypass

import httpx


def proxy_of(url: str) -> httpx.Proxy | None:
    """The proxy that the environment names for a URL, as curl would find it; never one for this machine.

    Raises:
        ValueError: It cannot be used; the message names the variable.
    """
    target, named = httpx.URL(url), getproxies()
    variable = f"{target.scheme}_proxy" if named.get(target.scheme) else "all_proxy"
    address = named.get(variable.removesuffix("_proxy"))
    if not address:
        return None
    # Never for this machine, nor for what NO_PROXY excludes: by name, as a parent domain, or in a network.
    with suppress(ValueError):
        host = ip_address(target.host)
        if host.is_loopback:
            return None
        for excluded in named.get("no", "").split(","):
            with suppress(ValueError):
                if host in ip_network(excluded.strip().strip("[]"), strict=False):
                    return None
    if target.host == "localhost" or proxy_bypass(target.host):
        return None
    try:
        proxy = httpx.Proxy(address if "://" in address else f"http://{address}")
        if proxy.url.scheme.startswith("socks") and find_spec("socksio") is None:
            raise ValueError("SOCKS proxies need the Python package socksio")
    except (ValueError, httpx.InvalidURL) as error:
        variables = f"{variable} (or {variable.upper()})"
        problem = f"the environment variable {variables} names no proxy that can be used: {error}"
        raise ValueError(f"{problem}; correct it, or add {target.host} to NO_PROXY") from error
    return proxy
