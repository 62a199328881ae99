"""Attacks of each kind on every page of the studio: none changes or reveals a file, and each gets a status in time."""

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import pytest
from bare_media import write_captioned_folder
from report_runs import write_run
from starlette.applications import Starlette
from starlette.routing import Route
from studio_client import ORIGIN, StudioClient, ask, serving

from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.report.captions.page import compute_caption_version
from dit_lora.studio.app import build_app, list_pages
from dit_lora.studio.library import RunLibrary, compute_run_id
from dit_lora.studio.server import HOST, StudioServer

SECRET = "a secret of the user"
ODD_NAMES = (
    "50%25.png",
    "%2e%2e.png",
    "a'b\"<c>.png",
    "two\nlines.png",
    os.fsdecode(b"caf\xe9.png"),
    "\u202eright.png",
)
HUGE = "9" * 4000
MAX_SECONDS = 10.0


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a data set, next to a file that no page may show."""
    base = tmp_path_factory.mktemp("attacked")
    (base / "secret.png").write_text(SECRET)
    (base / "secret.jsonl").write_text(SECRET)
    root = base / "work"
    root.mkdir()
    save = write_run(root / "run") / "checkpoints" / "step_000010"
    save.mkdir(parents=True)
    (save / "pytorch_lora_weights.safetensors").write_bytes(b"weights")
    data = write_captioned_folder(root / "data")
    picture = next(data.glob("stills/*.*")).read_bytes()
    for name in ODD_NAMES:
        (data / name).write_bytes(picture)
    (data / "link.png").symlink_to(base / "secret.png")
    (data / "linked").symlink_to(base)
    os.mkfifo(data / "pipe.png")
    os.mkfifo(root / "run" / "pipe.png")
    (root / "linked-run").symlink_to(base)
    return root


@pytest.fixture(scope="module")
def app(root: Path) -> Starlette:
    return build_app(list_pages(RunLibrary([root])))


@pytest.fixture(scope="module")
def data_path(root: Path) -> str:
    return f"/data/{compute_run_id(root / 'data')}/"


@pytest.fixture(scope="module")
def addresses(app: Starlette, root: Path) -> dict[str, list[str]]:
    """The address of every page, by method."""
    ids = {"run_id": compute_run_id(root / "run"), "data_id": compute_run_id(root / "data")}
    found: dict[str, list[str]] = {"GET": [], "POST": []}
    for route in app.routes:
        assert isinstance(route, Route)
        path = re.sub(r"{(\w+)[^}]*}", lambda match: ids.get(match[1], "x.png"), route.path)
        found["POST" if route.methods == {"POST"} else "GET"].append(path)
    assert min(map(len, found.values())) >= 9
    return found


@pytest.fixture
def snapshot(root: Path) -> Iterator[None]:
    """Fails the test if it has changed a file below the studio's folder."""

    def read() -> dict[str, bytes]:
        files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path): path.read_bytes() for path in files if ".captions/" not in f"{path}"}

    before = read()
    yield
    assert read() == before


def test_other_sites_write_nothing(app: Starlette, addresses: dict[str, list[str]], snapshot: None) -> None:
    client = StudioClient(app)
    token = client.keys.page_token
    for path in addresses["POST"]:
        for values, headers in (
            ({"token": token}, {}),
            ({"token": token}, {"Origin": "http://evil.example"}),
            ({"token": token}, {"Origin": "null"}),
            ({"token": client.keys.session}, {"Origin": ORIGIN}),
        ):
            assert client.post(path, data=values, headers=headers).status_code == 403, path
        # What a form can send without a token, and a read that should have been a write.
        assert client.post(path, content="a=b", headers={"Origin": ORIGIN}).status_code == 400
        assert client.get(path).status_code in (200, 400, 404, 405)


def test_a_rebound_name_reads_nothing(app: Starlette, addresses: dict[str, list[str]]) -> None:
    client = StudioClient(app)
    for path in (*addresses["GET"], *addresses["POST"]):
        answer = client.get(path, headers={"Host": "evil.example:8000"})
        assert (answer.status_code, len(answer.content) < 100) == (421, True), path


def test_no_path_leads_out_of_the_folders(
    app: Starlette, addresses: dict[str, list[str]], data_path: str, root: Path, snapshot: None
) -> None:
    run_path = f"/runs/{compute_run_id(root / 'run')}/"
    outside = ("../../secret.png", "../secret.png", str(root.parent / "secret.png"), "linked/secret.png", "link.png")
    client = StudioClient(app)
    with serving(app) as server:
        for prefix in (f"{data_path}media/", f"{data_path}thumbnail/", run_path, "/static/"):
            for name in outside:
                for address in (name, quote(name), quote(name, safe=""), name.replace("../", "..%2f"), name + "%00"):
                    status, body, _ = ask(server, prefix + address)
                    assert (status, SECRET in body.decode(errors="replace")) == (404, False), prefix + address
    # A link in the folder is a sample of it, whose caption is written to the folder's own table.
    for name in (name for name in outside if not name.startswith("link")):
        values = {"file": name, "caption": "mine", "version": compute_caption_version("")}
        assert client.write(f"{data_path}caption", **values).status_code == 422, name
    for folder in (root.parent, root / "linked-run", root / "data" / "linked"):
        for prefix in ("/data/", "/runs/"):
            assert client.get(f"{prefix}{compute_run_id(folder)}/").status_code == 404
    assert client.get(f"/new?from={quote(str(root.parent / 'secret.jsonl'))}").status_code == 404


def test_links_and_pipes_are_neither_read_nor_waited_for(app: Starlette, data_path: str, tmp_path: Path) -> None:
    client, begin = StudioClient(app), time.monotonic()
    for name in ("link.png", "pipe.png"):
        for kind in ("media", "thumbnail"):
            assert client.get(f"{data_path}{kind}/{name}").status_code == 404, (kind, name)
    assert client.get(data_path).status_code == 200
    # An audit and undo steps that are a link or a pipe count as none.
    folder = write_captioned_folder(tmp_path / "data")
    for name in ("audit.json", "part_0.jsonl"):
        os.mkfifo(folder / ".captions" / name)
    (folder / ".captions" / "undo" / "00000009.json").symlink_to("/etc/hostname")
    own = StudioClient(build_app(list_pages(RunLibrary([folder]))))
    assert own.get(f"/data/{compute_run_id(folder)}/").status_code == 200
    assert time.monotonic() - begin < MAX_SECONDS


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for name in (".captions", ".captions/undo", ".captions/thumbnails", ".captions/table.lock", "metadata.jsonl"):
        folder = write_captioned_folder(tmp_path / "data" / name.replace("/", "_"))
        (folder / ".captions").mkdir(exist_ok=True)
        link, target = folder / name, outside / ("lock" if name.endswith(".lock") else "folder")
        if name == "metadata.jsonl":
            target = link.rename(outside / name)
        elif link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        table = outside / "metadata.jsonl"
        before = table.read_bytes() if table.exists() else None
        client = StudioClient(build_app(list_pages(RunLibrary([folder]))))
        page = f"/data/{compute_run_id(folder)}/"
        file = CaptionTable.read(folder).media[0]
        client.get(f"{page}thumbnail/{quote(file)}")
        values = {"file": quote(file), "caption": "mine", "version": compute_caption_version("the same")}
        assert client.write(f"{page}caption", **values).status_code == (200 if "thumb" in name else 422), name
        if name == ".captions":
            form = {"token": client.keys.page_token}
            assert client.post(f"{page}audit", data=form, headers={"Origin": ORIGIN}).status_code == 422
        assert (list((outside / "folder").iterdir()), (outside / "lock").exists()) == ([], False), name
        assert (table.read_bytes() if table.exists() else None) == before


def test_a_table_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = write_captioned_folder(tmp_path / "data")
    (folder / "metadata.jsonl").unlink()
    os.mkfifo(folder / "metadata.jsonl")
    client = StudioClient(build_app(list_pages(RunLibrary([folder]))))
    answer = client.get(f"/data/{compute_run_id(folder)}/")
    assert (answer.status_code, "metadata.jsonl is not a regular file; remove it" in answer.text) == (400, True)


@pytest.mark.parametrize("number", [HUGE, "-1", "1e9", "\u0663", "", "nan", "0x10"])
def test_numbers_out_of_range_are_answered(app: Starlette, root: Path, data_path: str, number: str) -> None:
    client = StudioClient(app)
    work = f"/runs/{compute_run_id(root / 'run')}/work/"
    posts: list[tuple[str, dict[str, str]]] = [
        (f"{data_path}describe", {"model": "x", "max_tokens": number}),
        (f"{work}sample", {"prompt": "x", "save": f"{number}@x", "seed": number, "inference_steps": number}),
        (f"{work}mark", {"save": f"{number}@x", "marked": "None"}),
        ("/jobs/stop", {"job": number}),
        (f"{data_path}undo", {"step": number}),
    ]
    for path, values in posts:
        answer = client.post(path, data={"token": client.keys.page_token, **values}, headers={"Origin": ORIGIN})
        assert 400 <= answer.status_code < 500, (path, answer.text)
    for address in (f"{data_path}?page=", f"{data_path}?length=", f"{data_path}?shape=", "/?page="):
        assert client.get(address + quote(number)).status_code in (200, 400), address
    assert client.get(f"{data_path}?recipe={quote(number or 'x')}").status_code == 404


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_shown_served_and_edited_as_they_are(
    app: Starlette, data_path: str, root: Path, name: str
) -> None:
    client = StudioClient(app)
    address = quote(os.fsencode(name))
    page = client.get(data_path).content.decode()
    assert f'data-file="{address}"' in page
    assert "<c>" not in page
    with serving(app) as server:
        for kind in ("media", "thumbnail"):
            status, body, headers = ask(server, f"{data_path}{kind}/{address}")
            assert (status, headers["content-type"].startswith("image/"), len(body) > 0) == (200, True, True)
    caption = f"a picture, {ODD_NAMES.index(name)}"
    values = {"file": address, "caption": caption, "version": compute_caption_version("")}
    assert client.write(f"{data_path}caption", **values).status_code == 200
    assert CaptionTable.read(root / "data").captions[name] == caption


def test_many_and_slow_connections_leave_the_pages_quick(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dit_lora.studio.server.REQUEST_SECONDS", 1.0)
    with serving(app) as server:
        ask(server, "/data")
        connections = []
        for number in range(150):
            connections.append(socket.create_connection((HOST, server.keys.port), timeout=60))
            # At once: what is sent after the answer to a slow client resets its connection.
            connections[-1].sendall(b"GET /data HTTP/1.1\r\nHost: x" if number % 2 else b"P")
        begin = time.monotonic()
        assert ask(server, "/data")[0] == 200
        assert time.monotonic() - begin < MAX_SECONDS
        # Each of them is answered when its time is over, and closed.
        answers = [connection.makefile("rb").read() for connection in connections]
        assert {answer[:13] for answer in answers} == {b"HTTP/1.1 408 "}
        _ask_at_once(server, 30)


def test_a_page_is_answered_while_another_user_opens_connections(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dit_lora.studio.server._MAX_CONNECTIONS", 60)
    with serving(app) as server:
        host = f"{HOST}:{server.keys.port}"
        # Without a request, with a part of it, and idle after a refusal: none of them has the cookie.
        for data in (b"", b"GET / HTTP/1.1\r\nHost: x", f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()):
            connections = []
            for number in range(150):
                # What the first ones have sent is read by then.
                assert number != 30 or ask(server, "/data")[0] == 200
                connections.append(socket.create_connection((HOST, server.keys.port), timeout=60))
                connections[-1].sendall(data)
            begin = time.monotonic()
            assert ask(server, "/data")[0] == 200
            assert time.monotonic() - begin < MAX_SECONDS
            if not data.endswith(b"\r\n\r\n"):
                # The oldest one is closed, with an answer.
                assert connections[0].makefile("rb").read().startswith(b"HTTP/1.1 408 ")
            for connection in connections:
                connection.close()


def test_a_client_that_closes_its_side_is_answered(app: Starlette) -> None:
    with serving(app) as server:
        head = f"GET /none HTTP/1.1\r\nHost: {HOST}:{server.keys.port}\r\n"
        requests = {f"{head}\r\n": b"403", f"{head}\r\n{head}\r\n": b"403", head: b"408", "": b"408"}
        for request, status in requests.items():
            with socket.create_connection((HOST, server.keys.port), timeout=60) as connection:
                connection.sendall(request.encode())
                connection.shutdown(socket.SHUT_WR)
                answer = connection.makefile("rb").read()
            assert answer.startswith(b"HTTP/1.1 " + status), request
            assert answer.count(b"HTTP/1.1 ") == max(1, request.count("GET"))


def _ask_at_once(server: StudioServer, count: int) -> None:
    results: list[int] = []
    threads = [Thread(target=lambda: results.append(ask(server, "/data")[0])) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MAX_SECONDS)
    assert results == [200] * count


def test_a_refusal_shows_texts_as_they_are(app: Starlette, data_path: str) -> None:
    client = StudioClient(app)
    window = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    for text in ("</pre><script>1</script>", "\ud800", "{{ 7 * 7 }}", HUGE):
        address = f"{data_path}?length={quote(text, errors='surrogatepass')}"
        answer = client.get(address, headers=window)
        assert (answer.status_code, "<script>1" in answer.text, "49" in answer.text) == (400, False, False), text
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert client.get(address).headers["content-type"].startswith("text/plain")  # for a script
    assert client.get("/none", headers=window).status_code == 404


def test_a_stale_write_is_refused_and_shown(tmp_path: Path) -> None:
    folder = write_captioned_folder(tmp_path / "data")
    client = StudioClient(build_app(list_pages(RunLibrary([folder]))))
    path = f"/data/{compute_run_id(folder)}/"

    def post(action: str, **values: str) -> Any:
        return client.post(path + action, data={"token": client.keys.page_token, **values}, headers={"Origin": ORIGIN})

    def read_hidden(page: str, name: str) -> str:
        return page.split(f'name="{name}" value="')[1].split('"')[0]

    change = {"find": "same", "replacement": "other"}
    version = read_hidden(client.get(f"{path}change", params=change).text, "version")
    step = read_hidden(client.get(path).text, "step")
    first = CaptionTable.read(folder).media[0]
    with lock_table(folder) as table:
        table.write_captions({first: "the same, by another editor"})
    before = (folder / "metadata.jsonl").read_bytes()
    answer = post("change", **change, version=version)
    assert (answer.status_code, "the other, by another editor" in answer.text) == (409, True)
    assert "captions have changed" in post("undo", step=step).text
    stale = client.write(
        f"{path}caption", file=quote(first), caption="mine", version=compute_caption_version("the same")
    )
    assert (stale.status_code, json.loads(stale.text)["caption"]) == (409, "the same, by another editor")
    assert (folder / "metadata.jsonl").read_bytes() == before
    assert post("change", **change, version=read_hidden(answer.text, "version")).status_code == 303
    assert CaptionTable.read(folder).captions[first] == "the other, by another editor"
    assert post("undo", step=read_hidden(client.get(path).text, "step")).status_code == 303
    assert (folder / "metadata.jsonl").read_bytes() == before
