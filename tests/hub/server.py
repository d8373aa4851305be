"""A hub on loopback: repositories of files, with the requests that `huggingface_hub` makes to download them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """Repositories by name; each push is a commit, and requests are recorded."""

    def __init__(self):
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.requests: list[str] = []
        self.gated: set[str] = set()
        self.url = ""

    def push(self, name: str, folder: Path | None = None, **files: bytes) -> str:
        """Publish a folder and further files; return the commit."""
        content = dict(files)
        for path in sorted(folder.rglob("*")) if folder else ():
            if path.is_file():
                content[path.relative_to(folder).as_posix()] = path.read_bytes()
        history = self.commits.setdefault(name, [])
        commit = hashlib.sha1(f"{name}{len(history)}".encode()).hexdigest()
        history.append((commit, content))
        return commit

    def files(self, name: str, revision: str):
        """Return (commit, files) of a revision; None where there is none."""
        for commit, content in reversed(self.commits.get(name, [])):
            if revision in ("main", commit):
                return commit, content
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def _send(self, status, body=b"", **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), Content_Type="application/json")

    def _refuse(self, status, code):
        self._send(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(size)
        self.do_GET()

    def do_GET(self):
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path).strip("/")
        hub.requests.append(f"{self.command} {path}")
        kind = "models"
        if path.count("/") < 2 and path.startswith("api/"):
            return self._send(404)
        if path.startswith("api/"):
            _, kind, path = path.split("/", 2)
        elif path.startswith("datasets/"):
            kind, path = "datasets", path.removeprefix("datasets/")
        parts = path.split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        key = name if kind == "models" else f"datasets/{name}"
        if key not in hub.commits:
            return self._refuse(401, "RepoNotFound")
        if key in hub.gated:
            return self._refuse(403, "GatedRepo")
        revision = rest[1] if len(rest) > 1 else "main"
        found = hub.files(key, revision)
        if found is None:
            return self._refuse(404, "RevisionNotFound")
        commit, files = found
        if rest[:1] in ([], ["revision"]):
            siblings = [
                {"rfilename": n, "size": len(b), "blobId": hashlib.sha1(b).hexdigest()} for n, b in files.items()
            ]
            return self._json(
                {
                    "_id": "0",
                    "id": name,
                    "sha": commit,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                }
            )
        if rest[0] in ("tree", "paths-info"):
            entries = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in files.items()
            ]
            if rest[0] == "paths-info":
                text = self.body.decode()
                try:
                    wanted = json.loads(text)["paths"]
                except ValueError:
                    wanted = parse_qs(text).get("paths", [])
                entries = [e for e in entries if e["path"] in wanted]
            return self._json(entries)
        file = "/".join(rest[2:])
        if rest[0] != "resolve" or file not in files:
            return self._send(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        body = files[file]
        status, facts = (
            200,
            {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X_Repo_Commit": commit},
        )
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.command == "GET":  # streams read parts of files
            first, last = int(asked[1]), min(int(asked[2] or len(body)), len(body) - 1)
            facts["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        return self._send(status, body, **facts)


@contextmanager
def running_hub():
    """Serve a hub on a free port of loopback."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
