"""A hub on loopback: the answers that its library asks for, real bytes, and network faults."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the first commit").hexdigest()  # noqa: S324 - what git calls its commits by


@dataclass
class Hub:
    """Models by name; every request is recorded.

    `break_after` cuts each answer with a file after so many bytes.
    """

    models: dict[str, Path]
    gated: frozenset[str] = frozenset()
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and range."""
    break_after: int | None = None
    sick: frozenset[str] = frozenset()
    """Files that it cannot give just now."""
    breaks: int = 0
    """How many answers are still to be cut."""
    endpoint: str = ""

    def files_asked(self) -> list[str]:
        return [
            path.rsplit("/", 1)[-1]
            for method, path, _ in self.asked
            if method == "GET" and "/resolve/" in path
        ]


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_words) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        for name, folder in self.hub.models.items():
            if (
                path.startswith((f"/api/models/{name}/", f"/{name}/resolve/"))
                or path == f"/api/models/{name}"
            ):
                if name in self.hub.gated:
                    return self._refuse(403, "GatedRepo")
                return self._of_model(name, folder, path, body=body)
        return self._refuse(404, "RepoNotFound")

    def _of_model(self, name: str, folder: Path, path: str, *, body: bool) -> None:
        api = path.removeprefix(f"/api/models/{name}")
        if api.startswith("/revision/"):
            revision = api.removeprefix("/revision/")
            if revision not in {"main", "v1", COMMIT}:
                return self._refuse(404, "RevisionNotFound")
            return self._json({"id": name, "sha": COMMIT, "siblings": []})
        if api.startswith("/tree/"):
            return self._json([_entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()])
        file = folder / path.removeprefix(f"/{name}/resolve/{COMMIT}/")
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        if body and file.name in self.hub.sick:
            return self._refuse(500, "InternalError")
        return self._file(file, body=body)

    def _file(self, file: Path, *, body: bool) -> None:
        data = file.read_bytes()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        hub = self.hub
        if hub.breaks and hub.break_after is not None and len(data) - start > hub.break_after:
            hub.breaks -= 1
            self.wfile.write(data[start : start + hub.break_after])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.wfile.write(data[start:])

    def _json(self, told: object) -> None:
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(file: Path, folder: Path) -> dict[str, object]:
    data = file.read_bytes()
    return {
        "type": "file",
        "path": file.relative_to(folder).as_posix(),
        "size": len(data),
        "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),  # noqa: S324 - git's own
    }


@contextmanager
def serving(hub: Hub):
    """The hub, reachable at its `endpoint` until the block ends."""
    answer = type("Answer", (_Answer,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def nobody_there() -> str:
    """An endpoint at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"
