"""Serves the book on this machine: a page is made when it is asked for. __main__.py uses it.

A chapter's values take some seconds to record when it is first opened. They are kept (values.py).
"""

import contextlib
import sys
import threading
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from docs.book import runtime
from docs.book.search import index_script
from docs.book.site import INDEX, PYTHON, page_of, pages

ADDRESS = "127.0.0.1"  # nobody else's machine sees it
BUILDING = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Answers for the pages of the book, by name, and for nothing else."""

    def do_GET(self) -> None:  # the name that http.server asks for
        """Send a page, the index of the search box, or a part of Python."""
        name = self.name_asked()
        if name.startswith(PYTHON):
            self.send_part(name.removeprefix(PYTHON))
            return
        path = {page: path for path, page in pages().items()}.get(name)
        if path is None and name != INDEX:
            self.send_error(HTTPStatus.NOT_FOUND, "the book has no such page")
            return
        with BUILDING:
            body = page_of(path) if path else index_script(pages())
        kind = "text/html" if path else "text/javascript"
        self.send(body.encode(), f"{kind}; charset=utf-8")

    def send_part(self, name: str) -> None:
        """Send a file of python/. A browser keeps Pyodide's, which never change."""
        if name not in runtime.names():
            self.send_error(HTTPStatus.NOT_FOUND, "Python's parts are not here")
            return
        kept = "max-age=31536000, immutable" if name in runtime.PARTS else "no-store"
        self.send(runtime.content_of(name), runtime.kind_of(name), kept)

    def send(self, body: bytes, kind: str, kept: str = "no-store") -> None:
        """Send a reply."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", kept)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the reader went on
            self.wfile.write(body)

    def name_asked(self) -> str:
        """The page that is asked for."""
        return self.path.partition("?")[0].strip("/") or "index.html"

    def log_message(self, *given: object) -> None:
        """Print nothing: a reader is at work here, no web master."""


def server_at(port: int) -> ThreadingHTTPServer:
    """A server at a port, or at a free one if it is taken or none; port 0 is any free one."""
    try:
        return ThreadingHTTPServer((ADDRESS, port), Handler)
    except (OSError, OverflowError):
        return ThreadingHTTPServer((ADDRESS, 0), Handler)


def serve(port: int, opens: bool, fetches: bool) -> None:
    """Serve the book until Ctrl-C, and show it in a browser if `opens`.

    If `fetches`, the parts of Python that are missing are fetched meanwhile.
    """
    server = server_at(port)
    address = f"http://{ADDRESS}:{server.server_port}/"
    print(f"the book is at {address} until you press Ctrl-C", flush=True)
    if fetches and runtime.missing():
        print(f"fetching Python for the reader's browser to {runtime.parts_folder()}", flush=True)
    if fetches:
        threading.Thread(target=runtime.fetch, daemon=True).start()
    if opens:
        webbrowser.open(address)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    print("closed", file=sys.stderr)
