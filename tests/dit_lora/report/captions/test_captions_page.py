"""The page of captions: what it shows, which edits it takes and from whom, and an edit in a browser."""

import http.client
import json
import shutil
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from bare_media import write_without_captions

from dit_lora.data.sources.caption_table import CaptionTable, lock_table
from dit_lora.report.captions.page import (
    TextRules,
    check_table_captions,
    compute_caption_version,
    write_captions_page,
)
from dit_lora.report.captions.serve import CaptionEdits, CaptionHandler
from dit_lora.report.local_server import LocalServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = '</script><img src=x onerror="window.hit=1"><script>window.hit=1</script>'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Clips and a picture with captions that say the same, something hostile, and nothing."""
    root = tmp_path / "my clips"
    write_without_captions(root, clips=4, stills=1)
    names = CaptionTable.read(root).media
    captions = ["the same", "the same", HOSTILE, "a sks dog"]
    with lock_table(root) as table:
        table.write_captions(dict(zip(names, captions, strict=False)))
    return root


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[LocalServer, CaptionEdits]]:
    edits = CaptionEdits(folder, TextRules(trigger="sks"))
    with LocalServer(partial(CaptionHandler, edits), token=edits.token) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server, edits
        server.shutdown()
        thread.join()


def ask(
    server: LocalServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=100)
    data = None if body is None else json.dumps(body)
    cookie = {"Cookie": f"a=b; dit_lora_{server.server_port}={server.token}"}
    connection.request(method, path, data, cookie | headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_captions_are_judged_as_the_audit_does_and_by_the_trigger(folder: Path) -> None:
    table = CaptionTable.read(folder)
    findings = check_table_captions(table, TextRules(trigger="sks"))
    codes = [[finding.code for finding in findings.get(name, [])] for name in table.media]
    assert codes == [
        ["caption_duplicate", "trigger_missing"],
        ["caption_duplicate", "trigger_missing"],
        ["trigger_missing"],
        [],
        ["caption_missing"],
    ]
    assert not {"trigger_missing"} & {f.code for fs in check_table_captions(table, TextRules()).values() for f in fs}


def test_the_written_page_is_self_contained_and_escaped(folder: Path, tmp_path: Path) -> None:
    table = CaptionTable.read(folder)
    for page_path in (folder / "captions.html", tmp_path / "elsewhere" / "page.html"):
        page = write_captions_page(page_path, table, TextRules()).read_text()
        assert "<script" not in page.lower().replace("&lt;script", "")
        assert "<img src=x" not in page
        assert page.count("data:image/jpeg;base64,") == 5
        linked = 'href="stills/' in page
        assert linked == (page_path.parent == folder)


def test_an_edit_is_taken_from_its_own_page_alone(server: tuple[LocalServer, CaptionEdits], folder: Path) -> None:
    serving, edits = server
    origin = {"Origin": serving.origin, "Content-Type": "application/json"}
    name = CaptionTable.read(folder).media[0]
    good = {"token": edits.token, "file": name, "caption": "a\nnew   sks one"}
    good["version"] = compute_caption_version("the same")
    before = (folder / "metadata.jsonl").read_bytes()
    for status, path, body, headers in (
        (403, "/caption", good, {}),
        (403, "/caption", good, {"Origin": "http://evil.example"}),
        (421, "/caption", good, {**origin, "Host": "evil.example"}),
        (403, "/caption", {**good, "token": "x"}, origin),
        (404, "/other", good, origin),
        (400, "/caption", {"file": name}, origin),
        (400, "/caption", {key: good[key] for key in good if key != "version"}, origin),
        (400, "/caption", [1], origin),
        (422, "/caption", {**good, "file": "../secret.mp4"}, origin),
        (422, "/caption", {**good, "file": "metadata.jsonl"}, origin),
        (422, "/caption", {**good, "caption": "  "}, origin),
        (413, "/caption", {**good, "caption": "x" * 2**21}, origin),
    ):
        assert ask(serving, "POST", path, body, **headers)[0] == status, (path, body, headers)
        assert (folder / "metadata.jsonl").read_bytes() == before
    status, answer, _ = ask(serving, "POST", "/caption", good, **origin)
    version = compute_caption_version(good["caption"])
    state = {"caption": good["caption"], "version": version, "findings": []}
    assert (status, json.loads(answer)) == (200, state)
    assert CaptionTable.read(folder).captions[name] == good["caption"]


def test_what_is_sent_with_a_refused_request_is_no_request(
    server: tuple[LocalServer, CaptionEdits],
) -> None:
    # A page under another name that points here could else read this one, and its token.
    serving, edits = server
    inner = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{serving.server_port}\r\n\r\n"
    outer = f"POST /caption HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(inner)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", serving.server_port), timeout=100) as connection:
        connection.sendall((outer + inner).encode())
        answers = connection.makefile("rb").read()
    assert answers.count(b"HTTP/1.1 ") == 1
    assert answers.startswith(b"HTTP/1.1 421 ")
    assert edits.token.encode() not in answers


def test_a_client_that_pauses_while_it_sends_too_much_reads_the_refusal(
    server: tuple[LocalServer, CaptionEdits],
) -> None:
    """On a busy machine seconds may pass between two writes; a reset connection would lose the answer."""
    serving, _ = server
    head = f"POST /caption HTTP/1.1\r\nHost: 127.0.0.1:{serving.server_port}\r\nOrigin: {serving.origin}\r\n"
    with socket.create_connection(("127.0.0.1", serving.server_port), timeout=100) as connection:
        connection.sendall(f"{head}Content-Length: {2**21}\r\n\r\n".encode() + bytes(2**20))
        for size in (2**19, 2**19):
            time.sleep(2.2)
            connection.sendall(bytes(size))
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 413 ")


def test_media_of_the_folder_are_served_and_nothing_else(
    server: tuple[LocalServer, CaptionEdits], folder: Path
) -> None:
    serving, _ = server
    name = CaptionTable.read(folder).media[0]
    original_bytes = (folder / name).read_bytes()
    assert ask(serving, "GET", f"/media/{name}")[:2] == (200, original_bytes)
    status, part, headers = ask(serving, "GET", f"/media/{name}", Range="bytes=3-9")
    assert (status, part, headers["Content-Type"]) == (206, original_bytes[3:10], "video/mp4")
    (folder.parent / "secret.mp4").write_bytes(b"secret")
    for path in (
        "/media/metadata.jsonl",
        "/media/../secret.mp4",
        "/media/%2e%2e/secret.mp4",
        "/x",
        f"/{name}",
    ):
        assert ask(serving, "GET", path)[0] == 404, path
    assert ask(serving, "GET", "/", Host="evil.example")[0] == 421


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
def test_an_edit_in_a_browser_lands_in_the_file(server: tuple[LocalServer, CaptionEdits], folder: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    serving, _ = server
    names = CaptionTable.read(folder).media
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(request.url))
        page.goto(serving.url)
        cards = page.locator(".sample")
        assert cards.count() == 5
        page.wait_for_function("document.querySelector('video').readyState >= 1")
        assert page.evaluate("document.querySelector('img').naturalWidth") == 32
        assert cards.nth(2).locator("textarea").input_value() == HOSTILE
        card = cards.nth(0)
        assert card.locator("button").is_disabled()
        card.locator("textarea").fill("a sks square")
        card.locator("button").click()
        sync_api.expect(card.locator(".said")).to_have_text("saved")
        sync_api.expect(card.locator(".findings li")).to_have_count(0)
        # Changed elsewhere since: the page keeps the text, shows the file's, and replaces it if asked again.
        with lock_table(folder) as table:
            table.write_captions({names[0]: "by another editor"})
        card.locator("textarea").fill("mine sks")
        card.locator("button").click()
        sync_api.expect(card.locator(".now pre")).to_have_text("by another editor")
        assert card.locator("textarea").input_value() == "mine sks"
        card.locator("button").click()
        sync_api.expect(card.locator(".now")).to_be_hidden()
        # By keys; and what cannot be trained on is refused, and still to be saved.
        second_textarea = cards.nth(4).locator("textarea")
        second_textarea.fill("a still")
        second_textarea.press("Control+Enter")
        sync_api.expect(cards.nth(4).locator(".findings .code")).to_have_text("trigger_missing")
        cards.nth(3).locator("textarea").fill("")
        cards.nth(3).locator("button").click()
        sync_api.expect(cards.nth(3).locator(".said")).to_have_text("not saved: its caption is empty")
        assert cards.nth(3).locator("button").is_enabled()
        page.evaluate("window.onbeforeunload = null")
        assert page.evaluate("window.hit") is None
        assert errors == []
        browser.close()
    captions = CaptionTable.read(folder).captions
    assert (captions[names[0]], captions[names[4]]) == ("mine sks", "a still")
    assert captions[names[3]] == "a sks dog"
