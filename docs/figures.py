"""Draw what memories hold of a document, README's picture among it: python -m docs.figures.

It writes SVG into docs/figures/. The others there are drawings, whose SVG is their source; commit
e1aa81fa has the code that they began with. It needs the extra `plot`. Sizes are in inches of a
page, places in units of each picture's own.
"""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from reference import compressive

HERE = Path(__file__).parent
PAPER = "#ffffff"  # an opaque page: legible whatever lies behind it
INK = "#1f2933"
FAINT = "#5f6c7b"
TOKEN = "#2f6fb0"
STATE = "#c2571a"
PREVIOUS = "#8fb6dc"
HIDDEN = "#edf0f3"

matplotlib.use("svg")
plt.rcParams["svg.hashsalt"] = "palimpsest"  # the same file every time
plt.rcParams["svg.fonttype"] = "none"


def new_figure(width, height):
    """Begin a picture of so many inches, without axes; all that follows is drawn in it."""
    plt.figure(figsize=(width, height))
    plt.axis("off")


def save(name, *limits):
    """Write a picture, from x to x and from y to y; the same is the same file."""
    plt.axis(limits)
    path = HERE / "figures" / f"{name}.svg"
    plt.savefig(path, bbox_inches="tight", facecolor=PAPER, metadata={"Date": None})


def arrow(x, to_x, y):
    """A faint arrow from the right to the left, bent."""
    style = {"arrowstyle": "-|>", "color": FAINT, "lw": 1.5, "connectionstyle": "arc3,rad=-0.4"}
    plt.annotate("", (to_x, y), (x, y), arrowprops=style)


def frame(x, y, width, height, colour, **style):
    """A rectangle, whose lower left corner is at (x, y)."""
    plt.gca().add_patch(Rectangle((x, y), width, height, fc=colour, ec="none", **style))


def label(x, y, text, colour=INK, size=10, ha="center", **style):
    """Text whose middle is at (x, y), or whose left or right end if `ha` says so."""
    plt.text(x, y, text, color=colour, fontsize=size, ha=ha, va="center", **style)


def note(x, y, text, size=9, **style):
    """Faint text beside what is shown."""
    label(x, y, text, FAINT, size, **style)


def positions_in_memory(config, segments):
    """Per segment, a set of positions for each row of [compressed | memory | segment].

    They are what stands there while the segment is read, by the reference's own queues: every
    position is a feature of its own, and mean pooling adds up the features of what it takes.
    """
    n = config.segment
    width = n * segments
    memory = np.zeros((1, config.memory, width))
    compressed = np.zeros((1, config.compressed_memory, width))
    shown = []
    for segment in range(segments):
        h = np.eye(width)[None, segment * n : (segment + 1) * n]
        rows = np.concatenate([compressed, memory, h], axis=1)[0]
        shown.append([np.flatnonzero(row) for row in rows])
        weights = np.zeros((1, 1, n, len(rows)))
        memory, compressed, _, _ = compressive.remember_forward(
            {}, config, h, memory, compressed, weights
        )
    return shown


def row_of_memory(x, y, positions, colour):
    """A row of a memory: which positions it holds, grey if none."""
    if len(positions) == 0:
        text = "0"
        colour = HIDDEN
        ink = FAINT
    else:
        text = f"{positions[0]}"
        if len(positions) > 1:
            text += f"-{positions[-1]}"
        ink = INK if colour == PREVIOUS else "white"
    frame(x, y, 0.94, 0.9, colour)
    label(x + 0.47, y + 0.45, text, ink, 8)


def memories():
    """What is where in memory after each segment, at the sizes of the paper's Figure 1."""
    sizes = {"segment": 3, "memory": 6, "compressed_memory": 6, "compression_rate": 3}
    config = compressive.Config(**sizes, compression="mean_pooling")
    parts = (("compressed memory", 6, STATE), ("memory", 6, PREVIOUS), ("segment", 3, TOKEN))
    new_figure(11.4, 6.0)
    for row, shown in enumerate(positions_in_memory(config, 10)):
        y = 10 - row
        label(-0.3, y + 0.45, f"segment {row}", size=9, ha="right")
        x = 0.0
        column = 0
        for _, size, colour in parts:
            for positions in shown[column : column + size]:
                row_of_memory(x, y, positions, colour)
                x += 1
            x += 0.5
            column += size
    x = 0.0
    for name, size, _ in parts:
        label(x + size / 2, 11.4, name)
        x += size + 0.5
    arrow(6.9, 5.6, 0.85)
    note(6.2, 0.25, "3 rows compressed into 1")
    note(14.5, 0.25, "inputs become memory")
    arrow(13.6, 12.1, 0.85)
    save("compressive_memories", -2.0, 16.6, -0.1, 11.8)


MOMENTS = 8  # segments of a document
N = 3  # positions of a segment, where memories are shown
SLOTS = {  # {position that a slot has taken: the moments at which it holds it}, an example
    1: range(2, MOMENTS),
    4: range(3, 6),
    8: range(4, MOMENTS),
    9: range(5, 7),
    14: range(6, MOMENTS),
    17: range(7, MOMENTS),
}


def in_the_queue(moment):
    """(place, width, height, strength) of each compressed row, by the reference's own queues.

    It stands for several positions, and is drawn over all of them.
    """
    sizes = {"segment": N, "memory": N, "compressed_memory": 4, "compression_rate": N}
    config = compressive.Config(**sizes, compression="mean_pooling")
    rows = positions_in_memory(config, MOMENTS)[moment][:4]
    return [(held[0], len(held) - 0.2, 1.7, 1.0) for held in rows if len(held)]


def behind_the_gate(moment):
    """The same of Block-Recurrent: a gate lets go of a share of what came before, at each block."""
    blocks = range(moment - 1)
    return [(N * t + i, 1, 1.7, 0.7 ** (moment - 2 - t)) for t in blocks for i in range(N)]


def in_the_slots(moment):
    """The same of Memformer: what a slot took, until it takes something else."""
    return [(place, 1, 1.7, 1.0) for place, held in SLOTS.items() if moment in held]


def in_the_vector(moment):
    """The same of GPT-2: one vector of the last window, which had seen that of the one before."""
    return [(N * t, N + 0.1, 0.6, 0.6 ** (moment - 1 - t)) for t in range(moment)]


MEMORIES = {  # title, positions kept as they were, what holds older ones, what that is
    "compressive": (
        "Compressive",
        N,
        in_the_queue,
        "a queue; what leaves it is\ncompressed, 3 into 1",
    ),
    "block_recurrent": (
        "Block-Recurrent",
        N,
        behind_the_gate,
        "a few vectors; a gate mixes\nthe old with the new",
    ),
    "memformer": (
        "Memformer",
        N,
        in_the_slots,
        "four slots; each takes what\nit attends to, and holds it",
    ),
    "pretrained_recurrence": (
        "GPT-2 with recurrence",
        0,
        in_the_vector,
        "one vector, the mean\nof a whole window",
    ),
}


def memory_cells(name, left=0, top=0):
    """What a memory holds of a document: rows are moments, a segment apart, columns positions."""
    _, kept, held, _ = MEMORIES[name]
    for moment in range(MOMENTS):
        y = top - 1.9 * moment
        for place in range(N * moment + N):
            age = N * moment - 1 - place  # positions before the segment, negative in it
            colour = TOKEN if age < 0 else PREVIOUS if age < kept else HIDDEN
            frame(left + place, y, 0.9, 1.7, colour)
        for place, width, height, strength in held(moment):
            middle = y + 0.85 - height / 2
            frame(left + place, middle, width - 0.1, height, STATE, alpha=strength)


def cards():
    """A picture of each memory alone, for the first page of the book."""
    for name in MEMORIES:
        new_figure(3.6, 2.3)
        memory_cells(name)
        save(f"card_{name}", -0.5, 24.5, -14, 2.2)


def four_memories():
    """What each memory holds of a document, segment by segment: README's picture."""
    new_figure(5.6, 6.6)
    width = N * MOMENTS
    for place, (name, (title, _, _, what)) in enumerate(MEMORIES.items()):
        left = (place % 2) * (width + 4)
        top = -(place // 2) * 26
        memory_cells(name, left, top)
        label(left + width / 2, top + 3.2, title, size=13, weight="bold")
        label(left + width / 2, top - 1.9 * MOMENTS - 1.2, what, size=11)
    note(-1.8, -5.6, "a row a segment", rotation=90, size=10)
    note(-1.8, -31.6, "a row a segment", rotation=90, size=10)
    legend = (
        (0, -48.4, TOKEN, 1, "read now"),
        (0, -51.0, PREVIOUS, 1, "kept as it was"),
        (0, -53.6, HIDDEN, 1, "gone"),
        (19, -48.4, STATE, 1, "held, in fewer vectors"),
        (19, -51.0, STATE, 0.35, "fading: newer text is mixed in"),
    )
    for x, y, colour, strength, text in legend:
        frame(x, y, 1.6, 1.5, colour, alpha=strength)
        label(x + 2.4, y + 0.75, text, size=11, ha="left")
    save("four_memories", -3, 2 * width + 5, -54.4, 5)


PICTURES = (
    four_memories,
    cards,
    memories,
)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
