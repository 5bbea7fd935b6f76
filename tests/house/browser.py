"""Pages of the book in a headless Chromium. test_book.py and test_live.py use it."""

import json
import queue
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_a_browser = pytest.mark.skipif(not BROWSER, reason="apt-get install chromium")
WIDTHS = (393, 1024, 1440, 1920)
# a frame of each width in turn, because a window is never as narrow as a phone
AROUND = """<!doctype html><body><script>
const pages = PAGES;
const measured = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 900px`;
  frame.onload = () => {
    frame.onload = null;
    onmessage = ({ data }) => { frame.remove(); done(data); };
    const script = frame.contentDocument.createElement("script");
    script.textContent = SCRIPT;
    frame.contentDocument.body.append(script);
  };
  frame.src = `${page}.html`;
  document.body.append(frame);
});
(async () => {
  const found = [];
  for (const page of pages) {
    for (const width of WIDTHS) found.push({ page, width, ...await measured(page, width) });
  }
  await fetch("/", { method: "POST", body: JSON.stringify(found) });
})();
</script>"""


class Around:
    """Serves the page `around` the pages of a server; what that sends goes to a queue."""

    def do_GET(self):
        if self.path != "/around":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.around)

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.answers.put(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


class Handler(Around, SimpleHTTPRequestHandler):
    """Serves a folder, and the page around its pages."""


def measured(book, pages, profile, seconds):
    """What measure_book.js finds on pages of a book, at each of WIDTHS."""
    script = (Path(__file__).parent / "measure_book.js").read_text()
    text = AROUND.replace("WIDTHS", json.dumps(WIDTHS)).replace("PAGES", json.dumps(pages))
    around = text.replace("SCRIPT", json.dumps(script))
    return answer_of(partial(Handler, directory=str(book)), around, profile, seconds)


def answer_of(handler, around, profile, seconds, options=()):
    """What the page `around` posts, opened in the browser from a server of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.answers = queue.Queue()
    server.around = around.encode()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", *options]
    options += [f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    options += ["--window-size=1960,1100"]
    address = f"http://127.0.0.1:{server.server_port}/around"
    browser = subprocess.Popen([BROWSER, *options, address], stderr=subprocess.DEVNULL)
    try:
        return server.answers.get(timeout=seconds)
    finally:
        browser.terminate()
        browser.wait()
        server.shutdown()
        server.server_close()
