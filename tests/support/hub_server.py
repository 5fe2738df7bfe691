"""A local server that answers the requests that huggingface_hub sends to create a repository and to push to it."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """The repositories of a server: the content of their files by name, and the messages of all commits."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    refuses_commits: bool = False


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
            repository = "/".join(self.path.split("/")[3:5])
            if repository not in hub.files:
                return self.answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in hub.files[repository].items()
            ]
            if "/tree/" in self.path:
                return self.answer(200, entries)
            siblings = [{"rfilename": entry["path"]} for entry in entries]
            return self.answer(200, {"id": repository, "sha": "0" * 40, "siblings": siblings})

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
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
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
