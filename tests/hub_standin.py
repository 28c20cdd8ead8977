"""A hub on loopback: the part of the Hugging Face API that finding a model needs.

`Hub` serves repositories from memory: model info, and files with ETag, commit and byte ranges. It
can be made to refuse (gated, anonymous) or to break a connection in the middle of a file, and it
remembers what it was asked. Point a process at it with HF_ENDPOINT.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
"""What branch `main` and tag `v1` of every repository point to."""


@dataclass(slots=True, kw_only=True)
class Repository:
    """Files by name. `breaks_at` cuts every transfer of a file after so many of its bytes.

    `listed_commit` is what its listing says; one that differs from the files' is a push in between.
    """

    files: dict[str, bytes]
    gated: bool = False
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)
    breaks_at: dict[str, int] = field(default_factory=dict)
    listed_commit: str = COMMIT


@dataclass(slots=True, kw_only=True)
class Hub:
    """A running hub. `requests` are (method, path), oldest first."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    answers_unknown_with: int = 404

    def transferred(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        resolved = [path for method, path in self.requests if method == "GET"]
        return [path.split("/resolve/")[1].split("/", 1)[1] for path in resolved if "/res" in path]


class Refusal(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


def find_repository(hub: Hub, name: str, revision: str) -> Repository:
    repository = hub.repositories.get(name)
    if repository is None:
        raise Refusal(hub.answers_unknown_with, "RepoNotFound")
    if revision not in repository.revisions:
        raise Refusal(404, "RevisionNotFound")
    return repository


class Handler(BaseHTTPRequestHandler):
    """Answers for `hub`, which a subclass names."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append((self.command, path))
        try:
            if path.startswith("api/models/"):
                self.send_info(path.removeprefix("api/models/"))
            elif "/resolve/" in path:
                self.send_file(*path.split("/resolve/"))
            else:
                raise Refusal(404, "EntryNotFound")
        except Refusal as refusal:
            self.send(refusal.status, b"{}", {"X-Error-Code": refusal.code})

    def send_info(self, path: str) -> None:
        name, _, revision = path.partition("/revision/")
        repository = find_repository(self.hub, name, revision or "main")
        siblings = [{"rfilename": file} for file in repository.files]
        info: dict[str, Any] = {
            "id": name,
            "sha": repository.listed_commit,
            "siblings": siblings,
            "tags": [],
        }
        self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str, path: str) -> None:
        revision, _, file = path.partition("/")
        repository = find_repository(self.hub, name, revision)
        if repository.gated:
            raise Refusal(403, "GatedRepo")
        if file not in repository.files:
            raise Refusal(404, "EntryNotFound")
        content = repository.files[file]
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status, start = 200, 0
        if asked := self.headers.get("Range"):
            status, start = 206, int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send(status, content[start:], headers, repository.breaks_at.get(file), start)

    def send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str],
        breaks_at: int | None = None,
        start: int = 0,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        sent = body if breaks_at is None else body[: max(0, breaks_at - start)]
        self.wfile.write(sent)
        self.close_connection = len(sent) < len(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr: tests read that of the child."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub on a free port of loopback, gone when the block ends."""
    hub = Hub(url="")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
