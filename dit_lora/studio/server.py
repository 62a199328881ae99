"""Serve the studio on the loopback interface, with time limits for slow clients."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dit_lora.errors import DitLoraError
from dit_lora.studio.access import AccessControl, AccessKeys

HOST = "127.0.0.1"
REQUEST_SECONDS = 8.0
"""Seconds in which a client must have sent its request."""
_IDLE_SECONDS = 30  # an open connection without a request
_MAX_CONNECTIONS = 256  # a process can usually open 1,024 files
_MAX_READ_BYTES = 2**14  # at a time: parsing a body of tiny chunks is slow, and others wait meanwhile


class StudioServer:
    """HTTP server on the loopback interface only; port 0 chooses a free port.

    Every user of this machine can connect to it; `AccessControl` lets in only the browser that has opened the link.
    """

    def __init__(self, app: ASGIApp, port: int = 0, page: str = "/") -> None:
        try:
            self._socket = socket.create_server((HOST, port), backlog=128)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DitLoraError(
                f"port {port} cannot be used: {reason}; choose another with --port, or remove --port to use a free one"
            ) from error
        self.keys = AccessKeys(self._socket.getsockname()[1])
        self.url = self.keys.get_link(page)
        config = uvicorn.Config(
            AccessControl(app, self.keys),
            http=_LimitedProtocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            limit_concurrency=2 * _MAX_CONNECTIONS,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until Ctrl-C, which raises `KeyboardInterrupt`, or `stop`."""
        with self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


def serve_until_interrupted(
    app: ASGIApp, port: int, page: str, description: object, say: Callable[[str], None]
) -> None:
    """Serve the studio until Ctrl-C; `say` receives the link to a page and the closing message."""
    server = StudioServer(app, port, page)
    say(f"{description}: {server.url} (Ctrl-C to stop)")
    try:
        server.run()
    except KeyboardInterrupt:
        say("stopped")


class _LimitedProtocol(H11Protocol):
    """HTTP connection that is closed if a request is not complete in time. Uvicorn would wait for ever.

    Anybody on this machine can open connections: of too many, that which has waited longest for its client is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._last_time = 0.0  # of the last answer, or of the start

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _MAX_READ_BYTES  # type: ignore[attr-defined]
        self._last_time = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_slow_request)
        if len(self.connections) > _MAX_CONNECTIONS:
            # Not at once: what new connections have sent is read first.
            self.loop.call_later(0.1, self._end_oldest)

    def _end_oldest(self) -> None:
        others = [other for other in self.connections if isinstance(other, _LimitedProtocol) and other._is_waiting]
        if len(self.connections) > _MAX_CONNECTIONS and others:
            min(others, key=lambda other: other._last_time)._end_slow_request()

    @property
    def _is_waiting(self) -> bool:
        """True if the client must send the rest of a request, or read an answer, or has no request under way."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        is_waiting = not is_answering or self._deadline is not None or self.flow.write_paused
        return is_waiting and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Headers or body are incomplete.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._deadline = self._deadline or self.loop.call_later(REQUEST_SECONDS, self._end_slow_request)
        else:
            self._cancel_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        # A client may close its side as soon as it has sent its request, and read the answer then.
        self._is_half_closed = True
        if self._deadline is not None:
            self._end_slow_request()
        # False closes the connection.
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._last_time = self.loop.time()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_slow_request(self) -> None:
        # A request can have its answer before its body has come: a refusal.
        is_answered = self.conn.their_state is h11.SEND_BODY and self.cycle.response_started
        if self._deadline is not None and not is_answered:
            text = b"the request was not complete in time\n"
            head = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: "
            self.transport.write(head + b"%d\r\n\r\n" % len(text) + text)
        self._cancel_deadline()
        self.transport.close()
        # Closing waits until all is sent.
        if self.flow.write_paused:
            self.transport.abort()
