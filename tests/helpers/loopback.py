"""A file server on the loopback address; it can break off, refuse to resume a download, or list a bucket."""

import base64
import contextlib
import hashlib
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves {path: bytes}. break_after: bytes before a connection ends; ranges: whether parts are sent; page: books per list."""

    def __init__(self, files):
        self.files, self.break_after, self.ranges, self.page, self.asked = files, None, True, 2, []
        self.address = ""

    def respond(self, request):
        path, _, query = request.path.partition("?")
        self.asked.append((path, request.headers.get("Range")))
        if path == "/list":
            return self.send(request, 200, self.listing(dict(urllib.parse.parse_qsl(query))))
        if path not in self.files:
            return request.send_error(404)
        content, start = self.files[path], 0
        if request.headers.get("Range") and self.ranges:
            start = int(request.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                return request.send_error(416)
        self.send(request, 206 if start else 200, content[start:])

    def send(self, request, status, content):
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content if self.break_after is None else content[: self.break_after])

    def listing(self, query):
        """A page of the names and MD5 sums under a prefix, as Google's storage lists a bucket."""
        names = sorted(path[1:] for path in self.files if path[1:].startswith(query["prefix"]))
        start = int(query.get("pageToken") or 0)
        items = [{"name": n, "md5Hash": base64.b64encode(hashlib.md5(self.files["/" + n]).digest()).decode()} for n in names]
        page = {"items": items[start : start + self.page]}
        if start + self.page < len(items):
            page["nextPageToken"] = str(start + self.page)
        return json.dumps(page).encode()


@contextlib.contextmanager
def serving(files):
    """Run a Server inside."""
    server = Server(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.respond(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.address = f"http://127.0.0.1:{http.server_port}"
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        http.shutdown()
