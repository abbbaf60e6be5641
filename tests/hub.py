"""A model hub on loopback: as much of the hub's HTTP API as huggingface_hub needs to download a repository."""

import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves directories as repositories: ``repos[name] = {revision: directory}``; "main" is the default branch.

    ``requests`` lists (method, path) in order. ``delay_of[name]`` is how long each weight file of a repository takes, one
    after the other.
    """

    def __init__(self):
        self.repos: dict[str, dict[str, Path]] = {}
        self.requests: list[tuple[str, str]] = []
        self.delay_of: dict[str, float] = {}
        self._turn = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self, name: str = "", repo: str = "") -> list[str]:
        """Names of the files whose content was sent."""
        sent = [path.partition("/resolve/") for method, path in self.requests if method == "GET" and repo in path]
        return [file for _, _, rest in sent if (file := rest.partition("/")[2]) and name in file]


def commit(repo: str, revision: str) -> str:
    """The commit that a branch or tag stands for."""
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 5:
            found = self._find("/".join(parts[2:4]), parts[5])
            if found is None:
                return
            directory, sha = found
            if parts[4] == "revision":
                files = [{"rfilename": name} for name in _files(directory)]
                self._json({"id": "/".join(parts[2:4]), "sha": sha, "siblings": files})
            elif parts[4] == "tree":
                self._json([
                    {"type": "file", "path": name, "size": (directory / name).stat().st_size, "oid": _blob(directory / name)}
                    for name in _files(directory)
                ])  # fmt: skip
        elif len(parts) >= 5 and parts[2] == "resolve":
            found = self._find("/".join(parts[:2]), parts[3])
            if found is None:
                return
            directory, sha = found
            file = directory / "/".join(parts[4:])
            if not file.is_file():
                self._missing("EntryNotFound", sha)
                return
            delay = self.hub.delay_of.get("/".join(parts[:2]), 0.0)
            if self.command == "GET" and file.suffix == ".safetensors" and delay:
                with self.hub._turn:
                    time.sleep(delay)
            self._send(file.read_bytes(), {"ETag": f'"{_blob(file)}"', "X-Repo-Commit": sha})
        else:
            self._missing("RepoNotFound")

    def _find(self, repo: str, revision: str) -> tuple[Path, str] | None:
        revisions = self.hub.repos.get(repo)
        if revisions is None:
            self._missing("RepoNotFound")
            return None
        for name, directory in revisions.items():
            if revision in (name, commit(repo, name)):
                return directory, commit(repo, name)
        self._missing("RevisionNotFound")
        return None

    def _missing(self, code: str, sha: str | None = None) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        if sha is not None:
            self.send_header("X-Repo-Commit", sha)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _blob(file: Path) -> str:
    """git's name of the content."""
    data = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
