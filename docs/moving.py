"""Draw the book's moving picture, docs/figures/book.gif, from its pages in a headless Chromium:
python -m docs.book --out BOOK, then python -m docs.moving BOOK. It puts the notebook's pictures
into it, too.

It needs Chromium and ImageMagick. Chromium is driven by its DevTools protocol, over two pipes.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLES = ("memory", "normed", "new")
PICTURE = Path(__file__).parent / "figures" / "book.gif"
TOUR = Path(__file__).parent / "tour.ipynb"
CELLS = {  # {cell of the tour: its picture}
    0: "figures/four_memories",
    3: "figures/compressive_memories",
    9: "results/recall-distance",
}
SIZE = {"width": 1130, "height": 800, "deviceScaleFactor": 1, "mobile": False}
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
SECTION = "document.getElementById('{section}').scrollIntoView(); "
SHOW = "slider.value = {segment}; show('slot_attention_forward'); "
POINT = (
    "[...at('code').querySelectorAll('.has')].find(each => each.innerText === '{name}').click(); "
)
LOADED = "if (document.readyState !== 'complete') await new Promise(done => { onload = done; })"
REPLAY = "document.querySelector('.replay').scrollIntoView(); "
STEP = (
    "{{ const bar = document.querySelector('.replay input'); bar.value = {step}; bar.oninput(); }}"
)


def values_scene() -> list[tuple[str, int]]:
    """(JavaScript that makes a frame, hundredths of a second to show it): a segment after another.

    It points at three variables of the function that writes a Memformer's slots.
    """
    section = SECTION.format(section="writing-slot-attention")
    frames = [(section + SHOW.format(segment=0), 200)]
    for name in VARIABLES:
        frames.append((POINT.format(name=name), 180))
    for segment in (1, 2, 0):
        frames.append((SHOW.format(segment=segment) + POINT.format(name=VARIABLES[-1]), 130))
    return frames


def replay_scene() -> list[tuple[str, int]]:
    """The same, of full back-propagation beside memory replay: a step after another."""
    frames = [(REPLAY + STEP.format(step=0), 150)]
    frames += [(STEP.format(step=step), 55) for step in range(1, 16)]
    frames.append((STEP.format(step=16), 250))
    return frames


class Browser:
    """A headless Chromium that shows a page."""

    def __init__(self, page: Path, profile: str):
        to_browser, self.requests = os.pipe()
        self.replies, from_browser = os.pipe()
        for end in (to_browser, from_browser):
            os.set_inheritable(end, True)
        command = [*CHROMIUM, "--remote-debugging-pipe", f"--user-data-dir={profile}"]

        def as_three_and_four() -> None:  # where Chromium reads and writes
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self.process = subprocess.Popen(
            command, preexec_fn=as_three_and_four, close_fds=False, stderr=subprocess.DEVNULL
        )
        self.session = None
        self.buffer = b""
        targets = self.call("Target.getTargets")["targetInfos"]
        [target] = [each["targetId"] for each in targets if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.call("Emulation.setDeviceMetricsOverride", **SIZE)
        self.call("Page.navigate", url=page.as_uri())
        self.run(LOADED)

    def call(self, method: str, **parameters: object) -> dict:
        """The result of a command of the protocol."""
        message = {"id": 1, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                self.buffer += os.read(self.replies, 1 << 16)
            reply, _, self.buffer = self.buffer.partition(b"\0")
            answer = json.loads(reply)
            if answer.get("id") == 1:
                return answer["result"]

    def run(self, script: str) -> None:
        """Run JavaScript in the page, and wait until it is drawn."""
        drawn = "await new Promise(done => setTimeout(done, 300));"
        expression = f"(async () => {{ {script}; {drawn} }})()"
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")

    def photograph(self, path: Path) -> None:
        """Write what the page shows as a PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


def attach(folder: Path) -> None:
    """Put the pictures of CELLS into the notebook, as attachments of their cells."""
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    for number, name in CELLS.items():
        path = folder / f"{Path(name).name}.png"
        drawing = (TOUR.parent / f"{name}.svg").as_uri()
        options = [f"--screenshot={path}", "--window-size=1130,800"]
        subprocess.run([*CHROMIUM, *options, drawing], capture_output=True, check=True)
        small = ["-trim", "-bordercolor", "white", "-border", "12", "+dither", "-colors", "32"]
        subprocess.run(["convert", str(path), *small, str(path)], check=True)
        picture = base64.b64encode(path.read_bytes()).decode()
        notebook["cells"][number]["attachments"] = {path.name: {"image/png": picture}}
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    TOUR.write_text(f"{text}\n", encoding="utf-8")


def draw(book: Path, folder: Path) -> None:
    """Photograph the scenes into a folder, and join them."""
    command = ["convert", "-loop", "0"]
    for page, frames in {"memformer": values_scene(), "replay": replay_scene()}.items():
        browser = Browser((book / f"{page}.html").resolve(), str(folder / page))
        for number, (script, hundredths) in enumerate(frames):
            browser.run(script)
            path = folder / f"{page}{number:02d}.png"
            browser.photograph(path)
            command += ["-delay", str(hundredths), str(path)]
        browser.process.terminate()
        browser.process.wait()
    command += ["-resize", "80%", "+dither", "-colors", "48", "-layers", "optimize", str(PICTURE)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        draw(Path(sys.argv[1]), Path(made))
        attach(Path(made))
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1e6:.2f} MB")
