"""A Hugging Face Hub for tests and documentation: what `huggingface_hub` 2 needs to push models and load them again.

    python tests/fake_hub.py --port 8765 --root /tmp/hub
    HF_ENDPOINT=http://127.0.0.1:8765 HF_HUB_DISABLE_XET=1 HF_HUB_OFFLINE=0 HF_TOKEN=hf_any hf auth whoami

No datasets, branches, pull requests or Xet. `Fault` makes a request go wrong. State is kept below `root`.
"""

import argparse
import base64
import hashlib
import json
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote, urlsplit

from card_rules import card_problems

SIGNATURE = "X-Signature=do-not-print-this"
"""What signs an upload's address, as of a real storage."""
_LFS = (".safetensors", ".mp4", ".png", ".bin", ".model")


@dataclass(frozen=True)
class Account:
    """Who a token belongs to, and what it may do."""

    name: str = "me"
    role: Literal["read", "write", "fineGrained"] = "write"
    orgs: tuple[str, ...] = ()

    def owns(self, repo_id: str) -> bool:
        return repo_id.partition("/")[0] in (self.name, *self.orgs)


@dataclass
class Fault:
    """Makes the next `times` requests whose `METHOD /path` fits `pattern` go wrong.

    `cut`: `before` reads half of the body and hangs up; `after` does what was asked and hangs up.
    """

    pattern: str
    status: int = 500
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    message: str = "injected"
    cut: Literal["", "before", "after"] = ""
    page: bool = False
    """Answer with an HTML page in place of JSON."""


@dataclass
class Repo:
    """A model's newest commit; files by path, as their blob's name, size and whether they are LFS."""

    private: bool
    commits: list[str] = field(default_factory=lambda: [secrets.token_hex(20)])
    titles: list[str] = field(default_factory=lambda: ["initial commit"])
    files: dict[str, tuple[str, int, bool]] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        return self.commits[-1]


class RefusedError(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str, code: str = "", **body: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.body = {"error": message, **body}


class FakeHub:
    """The server; a context manager that runs it in a thread. `accounts` are by token; without, any token is `me`."""

    def __init__(self, root: Path | None = None, accounts: Mapping[str, Account] | None = None, port: int = 0) -> None:
        self.root = root or Path(tempfile.mkdtemp(prefix="fake_hub_"))
        self.accounts = accounts
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        state = self.root / "state.json"
        if state.exists():
            stored = json.loads(state.read_text(encoding="utf-8"))
            self.repos = {name: Repo(**values) for name, values in stored.items()}
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, token: str | None = "hf_any") -> dict[str, str]:
        """What a process needs to take this for the Hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(self.root / "home"),
            **({"HF_TOKEN": token} if token else {}),
        }

    def add(self, repo_id: str, files: Mapping[str, bytes], private: bool = False) -> None:
        """Put a model there, as if somebody had pushed it."""
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repo(private))
            for path, content in files.items():
                lfs = path.endswith(_LFS)
                repo.files[path] = (self.store(content, lfs), len(content), lfs)
            repo.commits.append(secrets.token_hex(20))
            repo.titles.append("added")

    def read(self, repo_id: str, path: str) -> bytes:
        return (self.root / "blobs" / self.repos[repo_id].files[path][0]).read_bytes()

    def store(self, content: bytes, lfs: bool) -> str:
        name = hashlib.sha256(content).hexdigest() if lfs else git_oid(content)
        (self.root / "blobs" / name).write_bytes(content)
        return name

    def has(self, oid: str) -> bool:
        return (self.root / "blobs" / oid).exists()

    def save(self) -> None:
        state = json.dumps({name: asdict(repo) for name, repo in self.repos.items()})
        (self.root / "state.json").write_text(state, encoding="utf-8")

    def fault(self, request: str) -> Fault | None:
        """The injected fault of a request, counted."""
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def account(self, header: str | None) -> Account | None:
        token = (header or "").removeprefix("Bearer ").strip()
        if not token:
            return None
        if self.accounts is None:
            return Account()
        if token not in self.accounts:
            raise RefusedError(401, "Invalid username or password.")
        return self.accounts[token]

    def repo(self, repo_id: str, account: Account | None) -> Repo:
        repository = self.repos.get(repo_id)
        if repository is None or (repository.private and not (account and account.owns(repo_id))):
            raise RefusedError(404 if account else 401, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, repo_id: str, account: Account | None) -> Repo:
        repo = self.repo(repo_id, account)
        if account is None or account.role == "read" or not account.owns(repo_id):
            raise RefusedError(403, "you don't have the rights to write to this repository")
        return repo


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def create(hub: FakeHub, account: Account | None, body: Mapping[str, Any]) -> dict[str, Any]:
    if account is None:
        raise RefusedError(401, "Invalid username or password.")
    repo_id = f"{body.get('organization') or account.name}/{body['name']}"
    if account.role == "read" or not account.owns(repo_id):
        raise RefusedError(403, f"You don't have the rights to create a model under {repo_id}")
    url = f"{hub.url}/{repo_id}"
    if repo_id in hub.repos:
        raise RefusedError(409, "You already created this model repo", url=url)
    hub.repos[repo_id] = Repo(body.get("visibility") == "private" or bool(body.get("private")))
    hub.save()
    return {"url": url, "name": repo_id, "id": secrets.token_hex(12)}


def validate_card(content: str) -> dict[str, Any]:
    problems = card_problems(content)
    if problems:
        raise RefusedError(400, "invalid metadata", errors=[{"message": problem} for problem in problems])
    return {"errors": [], "warnings": []}


def commit(hub: FakeHub, repo_id: str, repo: Repo, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    header = lines[0]["value"]
    if header.get("parentCommit") not in (None, repo.sha):
        raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
    files = dict(repo.files)
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "file":
            content = base64.b64decode(value["content"])
            files[value["path"]] = (hub.store(content, lfs=False), len(content), False)
        elif line["key"] == "lfsFile":
            if not hub.has(value["oid"]):
                raise RefusedError(400, f"LFS object {value['oid']} was not uploaded")
            files[value["path"]] = (value["oid"], value["size"], True)
        elif line["key"] == "deletedFile":
            files.pop(value["path"], None)
    repo.files = files
    repo.commits.append(secrets.token_hex(20))
    repo.titles.append(header["summary"])
    hub.save()
    return {"commitUrl": f"{hub.url}/{repo_id}/commit/{repo.sha}", "commitOid": repo.sha}


def preupload(repo: Repo, body: Mapping[str, Any]) -> dict[str, Any]:
    answers = []
    for file in body["files"]:
        path = file["path"]
        stored = repo.files.get(path)
        mode = "lfs" if path.endswith(_LFS) or file["size"] > 10 * 2**20 else "regular"
        answer = {"path": path, "uploadMode": mode, "shouldIgnore": False}
        answers.append(answer | ({"oid": stored[0]} if stored else {}))
    return {"files": answers}


def batch(hub: FakeHub, body: Mapping[str, Any]) -> dict[str, Any]:
    objects = []
    for blob in body["objects"]:
        reply: dict[str, Any] = {"oid": blob["oid"], "size": blob["size"]}
        if not hub.has(blob["oid"]):
            reply["actions"] = {"upload": {"href": f"{hub.url}/lfs/{blob['oid']}?{SIGNATURE}"}}
        objects.append(reply)
    return {"transfer": "basic", "objects": objects}


def tree(repo: Repo) -> list[dict[str, Any]]:
    entries = []
    for path, (oid, size, lfs) in sorted(repo.files.items()):
        line: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": oid}
        if lfs:
            line |= {
                "oid": oid[:40],
                "lfs": {"oid": oid, "size": size, "pointerSize": 134},
            }
        entries.append(line)
    return entries


def info(repo_id: str, repo: Repo) -> dict[str, Any]:
    siblings = [{"rfilename": path} for path in sorted(repo.files)]
    fields = {"id": repo_id, "modelId": repo_id, "sha": repo.sha, "private": repo.private}
    return {**fields, "siblings": siblings, "tags": []}


_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<verb>\w+)(?:/(?P<revision>[^/?]+))?)?")


def api(hub: FakeHub, method: str, path: str, account: Account | None, body: bytes) -> Any:
    """What an address below /api, or an LFS one, answers as JSON."""
    if path == "/api/whoami-v2":
        if account is None:
            raise RefusedError(401, "Invalid username or password.")
        orgs = [{"name": name, "type": "org"} for name in account.orgs]
        token = {"displayName": "test", "role": account.role}
        return {"name": account.name, "type": "user", "orgs": orgs, "auth": {"accessToken": token}}
    if path == "/api/repos/create":
        return create(hub, account, json.loads(body))
    if path == "/api/validate-yaml":
        return validate_card(json.loads(body)["content"])
    if path.endswith(".git/info/lfs/objects/batch"):
        hub.writable(path[1:].partition(".git/")[0], account)
        return batch(hub, json.loads(body))
    match = _MODEL.fullmatch(path)
    if not match:
        raise RefusedError(404, f"{method} {path} is not implemented")
    repo_id, verb = match["repo"], match["verb"]
    if verb in ("preupload", "commit"):
        repo = hub.writable(repo_id, account)
        if verb == "preupload":
            return preupload(repo, json.loads(body))
        return commit(hub, repo_id, repo, [json.loads(line) for line in body.splitlines()])
    repo = hub.repo(repo_id, account)
    if match["revision"] not in (None, "main", *repo.commits):
        raise RefusedError(404, "no such revision", "RevisionNotFound")
    return tree(repo) if verb == "tree" else info(repo_id, repo)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        fault = self.hub.fault(f"{self.command} {path}")
        if fault and fault.cut == "before":
            self.rfile.read(size // 2)
            self._hang_up()
            return
        body = self.rfile.read(size)
        try:
            if fault and not fault.cut:
                self._break(fault)
                return
            answer = self._answered(path, body)
        except RefusedError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            self._answer(error.status, error.body, headers if error.code else {})
            return
        if fault:
            self._hang_up()
        elif answer is not None:
            self._answer(200, answer)

    def _answered(self, path: str, body: bytes) -> Any:
        """JSON to answer with; None where the answer has been given."""
        if path.startswith("/lfs/"):
            if hashlib.sha256(body).hexdigest() != path.removeprefix("/lfs/"):
                raise RefusedError(400, "not the bytes of this digest")
            self.hub.store(body, lfs=True)
            return {}
        with self.hub.lock:
            account = self.hub.account(self.headers.get("Authorization"))
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            if not match:
                return api(self.hub, self.command, path, account, body)
            repo = self.hub.repo(match[1], account)
            if match[3] not in repo.files:
                raise RefusedError(404, "Entry not found", "EntryNotFound")
            self._file(repo, match[3])
        return None

    def _file(self, repo: Repo, path: str) -> None:
        oid, size, lfs = repo.files[path]
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(size)} if lfs else {}
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": repo.sha, **linked}
        self._send(200, (self.hub.root / "blobs" / oid).read_bytes(), headers)

    def _break(self, fault: Fault) -> None:
        if fault.page:
            self._send(fault.status, b"<html>", {"Content-Type": "text/html", **fault.headers})
        else:
            self._answer(fault.status, {"error": fault.message}, fault.headers)

    def _answer(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(value).encode(), {**kind, **(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


for _verb in ("GET", "HEAD", "POST", "PUT"):
    setattr(_Handler, f"do_{_verb}", _Handler._serve)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--root", type=Path)
    options = parser.parse_args()
    FakeHub(options.root, port=options.port).server.serve_forever()


if __name__ == "__main__":
    main()
