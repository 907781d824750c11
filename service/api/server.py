"""The server that the API runs in.

It limits clients' use of it: the number of connections, and how long one may stay idle mid-request. Event streams stay
open as long as somebody reads them.
"""

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.auth import without_values
from service.api.deps import Context
from service.api.limits import network_of
from service.settings import Settings

HEAD_SECONDS = 10.0  # from the beginning of a connection, or of a later request on it, to the last header
BODY_SECONDS = 30.0
READ_SECONDS, READ_BYTES = 30.0, 16 * 2**10  # a client must read this much of a pending response in this time
TLS_SECONDS = 10.0

_MOST_DESCRIPTORS = 65_536
_LOG_SECONDS = 60.0
_OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})

_log = logging.getLogger(__name__)


def _closing_response(status: str, why: str) -> bytes:
    headers = f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(why)}\r\nRetry-After: 5"
    return f"HTTP/1.1 {status}\r\n{headers}\r\nConnection: close\r\n\r\n{why}".encode("ascii")


_TOO_MANY = _closing_response("503 Service Unavailable", "the service has too many connections; try again")
_TOO_SLOW = _closing_response("408 Request Timeout", "the request did not arrive in time; send it faster")


def raise_descriptor_limit() -> None:
    """Raise this process's limit on open connections and files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def most_connections(limit: int) -> int:
    """This number of connections, but at most half of the descriptors: databases, Ray and files need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if soft == resource.RLIM_INFINITY else max(2, min(limit, soft // 2))


class Notes(Counter[str]):
    """Connection problems for the log: at most one line per minute, however many there are."""

    _written = float("-inf")

    def write(self, now: float) -> None:
        """Write the line, if there is anything to report and the last one is at least a minute old."""
        if self and now - self._written >= _LOG_SECONDS:
            _log.warning("connections: %s", "; ".join(f"{count} {what}" for what, count in self.items()))
            self.clear()
            self._written = now


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, with a time limit for TLS handshakes."""

    async def create_server(self, *arguments: Any, **named: Any) -> asyncio.Server:
        """Start a server."""
        if named.get("ssl"):
            named["ssl_handshake_timeout"] = TLS_SECONDS
        return await super().create_server(*arguments, **named)


class _Connection(socket.socket):
    """A connection that reports when it is closed."""

    when_closed: Callable[[], object] | None = None

    def close(self) -> None:
        super().close()
        if self.when_closed:
            self.when_closed()


class Listener(socket.socket):
    """A listening socket with a limited number of connections; further ones are answered 503 and closed.

    Args:
        listening: The socket to listen on, which this one replaces.
        most: Maximum number of connections.
        proxies: Addresses and networks of proxies, or ``*``. Any other address gets half of the connections at most.
        encrypted: Whether clients speak TLS, so that refused ones cannot be told why.
        notes: Collects problems.
    """

    def __init__(
        self, listening: socket.socket, most: int, proxies: Iterable[str], encrypted: bool, notes: Notes
    ) -> None:
        super().__init__(fileno=listening.detach())
        self._most, self._most_of_one = most, most // 2
        self._proxies: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for proxy in ("0.0.0.0/0", "::/0") if "*" in proxies else proxies:
            with suppress(ValueError):  # uvicorn also trusts names, but TCP peers have none
                self._proxies.append(ipaddress.ip_network(proxy, strict=False))
        self._encrypted, self._notes = encrypted, notes
        self._open: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection.

        Raises:
            BlockingIOError: There is none now, or it was refused.
            OSError: It cannot be accepted, for example for lack of descriptors.
        """
        accepted, address = super().accept()
        connection, sender = _Connection(fileno=accepted.detach()), network_of(address[0])
        why = None
        if self._open.total() >= self._most:
            why = f"refused, because all {self._most} were in use"
        elif self._open[sender] >= self._most_of_one and not any(
            ipaddress.ip_address(address[0]) in network for network in self._proxies
        ):
            why = f"refused, because their address had {self._most_of_one} open"
        if why is not None:
            self._notes[why] += 1
            with connection, suppress(OSError):  # it may have been reset
                connection.setblocking(False)
                if not self._encrypted:
                    connection.send(_TOO_MANY)
            raise BlockingIOError
        self._open[sender] += 1
        connection.when_closed = weakref.finalize(connection, self._forget, sender)
        return connection, address

    def _forget(self, sender: str) -> None:
        self._open[sender] -= 1
        if not self._open[sender]:
            del self._open[sender]


class _Requests(h11.Connection):
    """h11's, without requests of which a proxy in front may see another end than h11 does (RFC 9112, section 6.1).

    What follows the end that the proxy sees would be taken for another sender's request.
    """

    def next_event(self) -> Any:
        """Return the next event.

        Raises:
            h11.RemoteProtocolError: The client does not speak HTTP, or its request's end is ambiguous.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding beside Content-Length or in HTTP/1.0")
        return event


class Protocol(H11Protocol):
    """uvicorn's, for clients that stop speaking HTTP in the middle of a request or while it is being answered.

    uvicorn itself would answer them a second time, which is an error with a traceback in the log. A connection on which
    a request does not arrive in time, or a response is not read, is ended.
    """

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        assert config.h11_max_incomplete_event_size is not None  # set by the server
        self.conn = _Requests(h11.SERVER, config.h11_max_incomplete_event_size)
        # What the connection was last seen waiting for, and since when.
        self._part: tuple[str, object] | None = None
        self._unread, self._part_since, self._unread_since = 0, 0.0, 0.0

    def send_400_response(self, msg: str) -> None:
        """Answer 400 unless an answer has begun, and close the connection."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # whatever the app has yet to say is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def look(self, now: float, notes: Notes) -> None:
        """End the connection if its time is up; to be called about once a second.

        Args:
            now: Seconds on a monotonic clock.
            notes: Collects problems.
        """
        # The part of a request that the server waits for; none between requests, and while it reads no more.
        state, part = self.conn.their_state, None
        if state is h11.IDLE and self.timeout_keep_alive_task is None:
            part = "head", self.cycle
        elif state is h11.SEND_BODY and not self.flow.read_paused:
            part = "body", self.cycle
        if part != self._part:
            self._part, self._part_since = part, now
        if part is not None and not self.transport.is_closing():
            seconds = HEAD_SECONDS if part[0] == "head" else BODY_SECONDS
            if now - self._part_since >= seconds:
                notes[f"closed, because the {part[0]} of a request took longer than {seconds:g} s"] += 1
                if self.cycle is None or not self.cycle.response_started:
                    self.transport.write(_TOO_SLOW)
                self.transport.close()

        unread = self.transport.get_write_buffer_size()
        if not self._unread or unread <= max(0, self._unread - READ_BYTES):
            self._unread, self._unread_since = unread, now
            return
        self._unread = max(unread, self._unread)
        if now - self._unread_since >= READ_SECONDS:
            notes[f"cut off, because an answer was not read for {READ_SECONDS:g} s"] += 1
            self.transport.abort()


GRACE_SECONDS = 20  # for pending requests to be answered, and responses read, when the server stops
_LOOK_SECONDS = 1.0
MOST_HEADER_BYTES = 32 * 2**10  # of a request's line and its headers together


class ApiServer(uvicorn.Server):
    """uvicorn with bounded connections, which ends open event streams when it stops.

    Args:
        app: The app, from ``service.api.app.create_app``.
        settings: The operator's settings: where to listen, with which certificate, and which proxies to trust.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop=f"{Loop.__module__}:{Loop.__name__}",
            http=Protocol,  # on h11, the implementation that limits headers
            ws="none",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=list(settings.trusted_proxies),
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
            log_config=None,  # its lines look like all others from this process
        )
        super().__init__(config)
        logging.getLogger("uvicorn.access").addFilter(without_values)
        self._settings = settings
        self._context: Context = app.state.context
        self._notes = Notes()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening.

        Args:
            sockets: Sockets to listen on, which the server closes; ``None``: listen where the settings say.
        """
        settings, most = self._settings, most_connections(self._settings.connections)
        limits = most, settings.trusted_proxies, settings.tls_cert is not None, self._notes
        listening = sockets or [listen(settings.host, settings.port)]
        listeners: list[socket.socket] = [Listener(each, *limits) for each in listening]
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().startup(listeners)
        self._watching = asyncio.create_task(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: accept no new connections, end streams, and answer other requests within the grace period."""
        self._context.stopping.set()
        self._context.stores.stop()
        await super().shutdown(sockets)
        self._context.reads.close()
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching

    async def _watch(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Protocol):
                    connection.look(now(), self._notes)
            self._notes.write(now())
            await asyncio.sleep(_LOOK_SECONDS)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors of the loop; it retries every second to accept connections without a free descriptor."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _OUT_OF_DESCRIPTORS:
            self._notes["attempts to accept one failed, because this process has no file descriptor left"] += 1
        else:
            loop.default_exception_handler(context)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        OSError: The address cannot be used.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
