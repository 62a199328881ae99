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
_MAX_CONNECTIONS = 512  # a process can usually open 1,024 files
_MAX_READ_BYTES = 2**14  # at a time: parsing a body of tiny chunks is slow, and others wait meanwhile


class StudioServer:
    """HTTP server on the loopback interface only; port 0 chooses a free port.

    Every user of this machine can connect to it; `AccessControl` lets in only the browser that has opened the link.
    """

    def __init__(self, app: ASGIApp, port: int = 0, page: str = "/") -> None:
        try:
            self._socket = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise DitLoraError(
                f"port {port} cannot be used: {reason}; choose another with --port, or remove --port to use a free one"
            ) from error
        self.keys = AccessKeys(self._socket.getsockname()[1])
        self.url = self.keys.get_link(page)
        config = uvicorn.Config(
            AccessControl(app, self.keys),
            http=_TimeLimitedProtocol,
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
            backlog=64,  # also the most connections that are accepted before others are answered
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


class _TimeLimitedProtocol(H11Protocol):
    """HTTP connection that is closed if a request is not complete in time. Uvicorn would wait for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._begin = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = _MAX_READ_BYTES  # type: ignore[attr-defined]
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._end_slow_request)
        # Every user of this machine can open connections: the oldest that wait for their client make room.
        if len(self.connections) > _MAX_CONNECTIONS:
            waiting = [
                item
                for item in self.connections
                if isinstance(item, _TimeLimitedProtocol) and item._is_waiting_for_client()
            ]
            for connection in sorted(waiting, key=lambda item: item._begin)[: _MAX_CONNECTIONS // 2]:
                connection._end_slow_request()

    def _is_waiting_for_client(self) -> bool:
        """True if the client must send a request or the rest of one, or read an answer."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return (is_idle or bool(self._deadline) or self.flow.write_paused) and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Headers or body are incomplete.
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._deadline = self._deadline or self.loop.call_later(REQUEST_SECONDS, self._end_slow_request)
        else:
            self._cancel_deadline()

    def eof_received(self) -> bool:  # type: ignore[override]
        # A client may close its side as soon as it has sent its request, and read the answer then.
        if self._deadline is not None:
            self._end_slow_request()
        if self.cycle is None or self.cycle.response_complete:
            return False  # closes the connection
        self.cycle.keep_alive = False
        return True

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
        self.connections.discard(self)
        self.transport.close()
        # Closing waits until all is sent.
        if self.flow.write_paused:
            self.transport.abort()
