"""A Hugging Face Hub on the loopback: the few requests that its client and datasets make.

Folders below the root are repositories, `models/OWNER/NAME/` and `datasets/OWNER/NAME/`, all at one
commit. HF_ENDPOINT names the server. Like the Hub it serves EvalPlus's releases nowhere.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    seen: list[str]

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.do_GET(asked=asked)

    def do_GET(self, *, body: bool = True, asked: bytes = b"") -> None:
        path = unquote(urlsplit(self.path).path)
        self.seen.append(path)
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) > 3:
            self._api(parts[1], "/".join(parts[2:4]), parts[4:], asked)
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            at = parts.index("resolve")
            self._file(kind, "/".join(parts[at - 2 : at]), parts[at + 1], parts[at + 2 :], body)
        else:
            self._send(404, b"")

    def _api(self, kind: str, repo: str, rest: list[str], asked: bytes) -> None:
        folder = self.root / kind / repo
        if not folder.is_dir():
            return self._send(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            chosen = [p for p in files if p.relative_to(folder).as_posix().startswith(below)]
            return self._json([self._entry(folder, p) for p in chosen])
        if rest[:1] == ["paths-info"]:
            wanted = set(json.loads(asked)["paths"])
            chosen = [p for p in files if p.relative_to(folder).as_posix() in wanted]
            return self._json([self._entry(folder, p) for p in chosen])
        if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            return self._send(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": p.relative_to(folder).as_posix()} for p in files]
        self._json({"id": repo, "sha": COMMIT, "siblings": siblings, "tags": []})

    def _entry(self, folder: Path, path: Path) -> dict[str, object]:
        name = path.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}

    def _file(self, kind: str, repo: str, revision: str, rest: list[str], body: bool) -> None:
        path = self.root.joinpath(kind, repo, *rest)
        if not (self.root / kind / repo).is_dir():
            return self._send(404, b"", **{"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._send(404, b"", **{"X-Error-Code": "RevisionNotFound"})
        if not path.is_file():
            return self._send(
                404, b"", **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            )
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes"}
        self._send(200, path.read_bytes(), body=body, **headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), **{"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, *, body: bool = True, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the repositories in `root`; yield the endpoint, and the paths asked for so far."""
    seen: list[str] = []
    handler = type("Handler", (_Handler,), {"root": root, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
