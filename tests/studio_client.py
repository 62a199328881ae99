"""Ask the studio's app, in this process or by a real server."""

import http.client
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from starlette.testclient import TestClient
from starlette.types import ASGIApp

from dit_lora.studio.access import AccessControl, AccessKeys
from dit_lora.studio.server import HOST, StudioServer

ORIGIN = f"http://{HOST}:8000"


class StudioClient(TestClient):
    """A browser that has opened the printed link."""

    def __init__(self, app: ASGIApp) -> None:
        self.keys = AccessKeys(8000)
        super().__init__(AccessControl(app, self.keys), base_url=ORIGIN, follow_redirects=False)
        self.cookies.set(self.keys.cookie_name, self.keys.session)

    def write(self, path: str, **values: Any) -> Any:
        """Post values as one of the studio's pages does."""
        return self.post(path, json={"token": self.keys.page_token, **values}, headers={"Origin": ORIGIN})


@contextmanager
def serving(app: ASGIApp, page: str = "/") -> Iterator[StudioServer]:
    server = StudioServer(app, page=page)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def ask(server: StudioServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    """A request with the cookie, whose path is sent as it is."""
    keys = server.keys
    connection = http.client.HTTPConnection(HOST, keys.port, timeout=100)
    connection.request(method, path, headers={"Cookie": f"a=b; {keys.cookie_name}={keys.session}"} | headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def send_raw(server: StudioServer, data: bytes) -> bytes:
    """Send bytes, and return all that is answered until the server closes the connection."""
    with socket.create_connection((HOST, server.keys.port), timeout=100) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()
