"""A hub of one data set on this machine: what the libraries ask of https://huggingface.co, as far as a data set of a few small
files needs it. Each request is kept."""

import hashlib
import http.server
import json
import threading
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"       # of the one commit


def start(name, files):
    """files: {path: bytes}. -> (server, its address); server.asked: [method and path]."""
    entry = lambda path: {"type": "file", "path": path, "size": len(files[path]), "oid": hashlib.sha1(files[path]).hexdigest()}

    class Hub(http.server.BaseHTTPRequestHandler):
        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in {"Content-Length": len(body), "X-Repo-Commit": SHA, **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            self.server.asked.append(f"{self.command} {path}")
            length = int(self.headers.get("Content-Length") or 0)
            asked = self.rfile.read(length)
            api, file = path.removeprefix(f"/api/datasets/{name}"), path.removeprefix(f"/datasets/{name}/resolve/")
            if path == "/":
                self.answer(200)
            elif file != path and file.partition("/")[2] in files:
                body = files[file.partition("/")[2]]
                self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', Accept_Ranges="bytes")
            elif file != path:
                self.answer(404, X_Error_Code="EntryNotFound")
            elif api.startswith("/tree/"):
                folder = "/".join(api.split("/")[3:])
                self.json([entry(path) for path in files if path.startswith(folder)])
            elif api.startswith("/paths-info/"):
                wanted = json.loads(asked)["paths"]
                self.json([entry(path) for path in wanted if path in files])
            elif api == "" or api.startswith("/revision/"):
                self.json({"id": name, "sha": SHA, "private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0,
                           "siblings": [{"rfilename": path} for path in files]})
            else:
                self.answer(404, X_Error_Code="RepoNotFound")

        do_HEAD = do_POST = do_GET

        def json(self, value):
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
