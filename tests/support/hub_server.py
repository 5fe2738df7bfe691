"""A local server that answers huggingface_hub's requests to create a repository, to push to it and to download from it."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"
NO_COMMIT = "0" * 40


@dataclass
class Hub:
    """The repositories of a server: the content of their files by name, and the messages of all commits.

    `publish` adds a commit that can be downloaded. `history` has the files of each such commit, `revisions` the commits of
    branches and tags, and `downloads` the files that were sent.
    """

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    refuses_commits: bool = False
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)

    def publish(self, repository: str, folder: Path) -> str:
        """Make the files of a folder the newest commit of a repository; return the commit."""
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        commit = hashlib.sha1(b"".join(files.values())).hexdigest()
        self.files[repository] = self.history[commit] = files
        self.revisions[repository, "main"] = commit
        return commit


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve an empty hub on a free port of this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/api/whoami-v2":
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    return self.answer(401, {"error": "Invalid user token."})
                return self.answer(200, {"type": "user", "name": "ada", "orgs": []})
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            in_api = parts[0] == "api"
            repository, rest = "/".join(parts[2:4] if in_api else parts[:2]), parts[4 if in_api else 2 :]
            if repository not in hub.files:
                return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            revision = rest[1] if len(rest) > 1 else "main"
            commit = hub.revisions.get((repository, revision), revision)
            if commit not in hub.history and revision != "main":
                return self.answer(404, {"error": "No such revision"}, {"X-Error-Code": "RevisionNotFound"})
            files = hub.history.get(commit, hub.files[repository])
            commit = commit if commit in hub.history else NO_COMMIT
            if not in_api:
                return self.send_file(repository, commit, files["/".join(rest[2:])], "/".join(rest[2:]))
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            if rest[:1] == ["tree"]:
                return self.answer(200, entries)
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            return self.answer(200, {"id": repository, "sha": commit, "siblings": siblings})

        do_HEAD = do_GET

        def send_file(self, repository, commit, content, name):
            if repository in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.answer(401, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            if self.command == "GET":
                hub.downloads.append(name)
            self.answer(200, content, headers)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                repository = f"{asked.get('organization', 'ada')}/{asked['name']}"
                if repository in hub.files:
                    return self.answer(
                        409, {"error": "You already created it", "url": f"{hub.address}/{repository}"}
                    )
                hub.files[repository] = {}
                hub.private[repository] = asked.get("visibility") == "private" or asked.get("private", False)
                return self.answer(200, {"url": f"{hub.address}/{repository}"})
            if self.path == "/api/validate-yaml":
                return self.answer(200, {"errors": [], "warnings": []})
            repository = "/".join(self.path.split("/")[3:5])
            if "/preupload/" in self.path:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                return self.answer(200, {"files": files})
            if hub.refuses_commits:
                return self.answer(403, {"error": "You have no right to write here"})
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    hub.messages.append(value["summary"])
                elif line["key"] == "deletedFile":
                    del hub.files[repository][value["path"]]
                else:
                    hub.files[repository][value["path"]] = base64.b64decode(value["content"])
            address = f"{hub.address}/{repository}/commit/{len(hub.messages):040}"
            return self.answer(200, {"commitUrl": address, "commitOid": "0" * 40})

        def answer(self, status, content, headers=None):
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def use_hub(patch: Callable[[Any, str, Any], None], address: str, cache: Path | str) -> None:
    """Make huggingface_hub in this process send its requests to `address`, and keep downloaded files in `cache`.

    huggingface_hub reads HF_ENDPOINT and HF_HUB_CACHE only once, when it is imported. `patch` is `setattr`, or the
    `setattr` of pytest's monkeypatch.
    """
    from huggingface_hub import constants

    patch(constants, "ENDPOINT", address)
    patch(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    patch(constants, "HF_HUB_CACHE", str(cache))
