"""Draw the book's moving picture, docs/figures/book.gif, from its pages in a headless Chromium:
python -m docs.book --out BOOK, then python -m docs.moving BOOK.

It needs Chromium and ImageMagick.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLES = ("memory", "normed", "new")
PICTURE = Path(__file__).parent / "figures" / "book.gif"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
# a photograph begins at a page's top, so a page that is scrolled stands in a frame
FRAME = "<body style='margin: 0'><iframe src={page} style='width: 100%; height: 800px; border: 0'>"
SECTION = "document.getElementById('{section}').scrollIntoView(); "
SHOW = "slider.value = {segment}; show('slot_attention_forward'); "
POINT = (
    "[...at('code').querySelectorAll('.has')].find(each => each.innerText === '{name}').click(); "
)
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


def try_one_scene() -> list[tuple[str, int]]:
    """The same, of two memories that were told facts: their answers, then what they hold."""
    return [("", 350), ("document.querySelector('.fields').scrollIntoView(); ", 250)]


def photograph(page: Path, path: Path) -> None:
    """Write what a page or a drawing shows as a PNG."""
    options = [f"--screenshot={path}", "--window-size=1130,800"]
    subprocess.run([*CHROMIUM, *options, page.as_uri()], capture_output=True, check=True)


def draw(book: Path, folder: Path) -> None:
    """Photograph the scenes into a folder, and join them.

    A frame is a copy of the page, in which all scripts up to the frame's have run.
    """
    command = ["convert", "-loop", "0"]
    scenes = {"try_one": try_one_scene(), "memformer": values_scene(), "replay": replay_scene()}
    for page, frames in scenes.items():
        text = (book / f"{page}.html").read_text(encoding="utf-8")
        copy = folder / f"{page}.html"
        around = folder / "around.html"
        around.write_text(FRAME.format(page=copy.name), encoding="utf-8")
        scripts = ""
        for number, (script, hundredths) in enumerate(frames):
            scripts += f"{script}\n"
            shown = text.replace("</body>", f"<script>{scripts}</script></body>")
            copy.write_text(shown, encoding="utf-8")
            path = folder / f"{page}{number:02d}.png"
            photograph(around, path)
            command += ["-delay", str(hundredths), str(path)]
    command += ["-resize", "80%", "+dither", "-colors", "48", "-layers", "optimize", str(PICTURE)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        draw(Path(sys.argv[1]), Path(made))
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1e6:.2f} MB")
