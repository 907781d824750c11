"""A proxy that loses answers on their way back: what was asked for has been done, and nobody hears of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_PASSED_ON = ("Authorization", "Content-Type", "Idempotency-Key", "If-Match")


@contextmanager
def forgetful(url: str, lost: int) -> Iterator[str]:
    """The address of a proxy of a service, which closes the connection instead of giving the first answers."""
    left = [lost]

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
            answer = httpx.request(self.command, url + self.path, headers=headers, content=body)
            if left[0]:
                left[0] -= 1
                return
            self.send_response(answer.status_code)
            for name in ("Content-Type", "Idempotency-Replayed"):
                if name in answer.headers:
                    self.send_header(name, answer.headers[name])
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any  # noqa: N815  # http.server's names

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
