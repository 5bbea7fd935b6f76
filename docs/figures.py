"""Draw the pictures of the chapters into docs/figures/ as SVG: python -m docs.figures.

It needs the extra `plot`. Sizes are in inches of a page, places in units of each picture's own.
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

from reference import block_recurrent, compressive, pretrained_recurrence
from reference.variants import compressive as compressive_variants

HERE = Path(__file__).parent
PAPER = "#ffffff"  # an opaque page: legible whatever lies behind it
INK = "#1f2933"
FAINT = "#5f6c7b"
TOKEN = "#2f6fb0"
STATE = "#c2571a"
PREVIOUS = "#8fb6dc"
GATE = "#5f8f2f"
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


def box(x, y, width, height, text, colour, size=9):
    """A rounded box, whose lower left corner is at (x, y), with white text in its middle."""
    shape = "round,pad=0.02,rounding_size=0.08"
    patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=colour, ec=colour)
    plt.gca().add_patch(patch)
    label(x + width / 2, y + height / 2, text, "white", size)


def arrow(x, y, to_x, to_y, colour=INK, dashed=False, bend=0.0):
    """An arrow from (x, y) to another place."""
    style = {
        "arrowstyle": "-|>",
        "color": colour,
        "lw": 1.5,
        "linestyle": "--" if dashed else "-",
        "connectionstyle": f"arc3,rad={bend}",
    }
    plt.annotate("", (to_x, to_y), (x, y), arrowprops=style)


def across(x, to_x, y, colour=INK, **style):
    """An arrow from left to right, or back, at the height y."""
    arrow(x, y, to_x, y, colour, **style)


def up(x, y, to_y, colour=INK, **style):
    """An arrow from below to above, or down, at x."""
    arrow(x, y, x, to_y, colour, **style)


def frame(x, y, width, height, fill, edge="none", **style):
    """A rectangle, whose lower left corner is at (x, y)."""
    plt.gca().add_patch(Rectangle((x, y), width, height, fc=fill, ec=edge, **style))


def square(x, y, text, colour, ink="white", size=8):
    """A unit square with text in it."""
    frame(x, y, 0.94, 0.94, colour)
    label(x + 0.47, y + 0.47, text, ink, size)


def label(x, y, text, colour=INK, size=10, ha="center", **style):
    """Text whose middle is at (x, y), or whose left or right end if `ha` says so."""
    plt.text(x, y, text, color=colour, fontsize=size, ha=ha, va="center", **style)


def note(x, y, text, size=9, **style):
    """Faint text beside what is shown."""
    label(x, y, text, FAINT, size, **style)


def mask_tile(window=8):
    """The W x 2W tile of Figure 2, from the reference's own mask and position buckets."""
    mask = block_recurrent.tile_mask(window)
    bucket = block_recurrent.position_bucket(block_recurrent.tile_distance(window), 8, 8)
    new_figure(8.2, 4.6)
    for i, j in np.ndindex(mask.shape):
        y = window - 1 - i
        if not mask[i, j]:
            frame(j, y, 0.94, 0.94, HIDDEN)
        elif j < window:
            square(j, y, str(bucket[i, j]), PREVIOUS, INK)
        else:
            square(j, y, str(bucket[i, j]), TOKEN)
    for side, text in ((0, "previous block"), (window, "own block")):
        label(side + window / 2, window + 0.5, f"keys of the {text}", size=11)
    label(-0.6, window / 2, "queries of one block", size=11, rotation=90)
    label(
        window,
        -0.7,
        "each token sees exactly the W tokens before it, never itself; "
        "the number is its position bucket",
        FAINT,
    )
    plt.plot([window - 0.03] * 2, [0, window], color=INK, lw=1.5)
    plt.gca().set_aspect("equal")
    save("block_recurrent_mask", -1.2, 2 * window + 0.2, -1.1, window + 1)


def cell():
    """One recurrent cell: the vertical and the horizontal direction, and what they share."""
    new_figure(9.2, 5.6)
    box(0.4, 0.2, 3.0, 0.6, "W token embeddings", TOKEN, 10)
    box(6.2, 0.2, 3.0, 0.6, "S state vectors  $c_t$", STATE, 10)
    box(0.4, 1.5, 3.0, 0.6, "norm;  $K_e, V_e, Q_e^v, Q_s^v$", TOKEN, 10)
    box(6.2, 1.5, 3.0, 0.6, "norm + state IDs;  $K_s, V_s, Q_s^h, Q_e^h$", STATE)
    box(0.0, 2.9, 1.8, 0.7, "self-attention\nto W tokens", TOKEN)
    box(2.2, 2.9, 1.8, 0.7, "cross-attention\nto S states", TOKEN)
    box(5.6, 2.9, 1.8, 0.7, "cross-attention\nto 2W tokens", STATE)
    box(7.8, 2.9, 1.8, 0.7, "self-attention\nto S states", STATE)
    box(0.4, 4.2, 3.0, 0.6, "[self; cross] $W_o$, + residual, MLP", TOKEN)
    box(6.2, 4.2, 3.0, 0.6, "[self; cross], gate with the carry", GATE)
    for x in (1.9, 7.7):
        up(x, 0.85, 1.45)
        up(x, 4.85, 5.35)
    for start, stop in ((1.3, 0.9), (2.5, 3.1), (7.1, 6.5), (8.3, 8.7)):
        arrow(start, 2.15, stop, 2.85)
    for start, stop in ((0.9, 1.4), (3.1, 2.4), (6.5, 7.2), (8.7, 8.2)):
        arrow(start, 3.65, stop, 4.15)
    arrow(3.45, 1.95, 5.55, 3.1, TOKEN)
    arrow(6.15, 1.95, 4.05, 3.1, STATE)
    label(4.8, 1.55, "keys and values are shared,\nqueries are not", INK, 9)
    label(1.9, 5.55, "W output embeddings (up the stack)", TOKEN)
    label(7.7, 5.55, "next states $c_{t+1}$ (to the next block)", STATE)
    up(9.3, 0.5, 4.5, FAINT, dashed=True, bend=0.25)
    note(10.15, 2.5, "carry")
    save("block_recurrent_cell", -0.2, 10.4, 0, 5.8)


def flow():
    """What passes from block to block and from segment to segment, and where the gradient stops."""
    new_figure(10.5, 4.0)
    for segment in range(2):
        left = segment * 5.4
        frame(left - 0.15, -0.35, 4.8, 3.5, "none", FAINT, ls=":")
        label(left + 2.25, 3.4, f"segment {segment}: N tokens, one optimizer step")
        for block in range(3):
            x = left + block * 1.6
            box(x, 0, 1.3, 0.6, f"block {3 * segment + block}", TOKEN)
            box(x, 2.2, 1.3, 0.6, "states", STATE)
            up(x + 0.5, 0.65, 2.15, TOKEN)
            up(x + 0.8, 2.15, 0.65, STATE)
            if block < 2:
                across(x + 1.35, x + 1.55, 2.5, STATE)
                across(x + 1.35, x + 1.55, 0.3, TOKEN)
    across(4.55, 5.35, 2.5, STATE, dashed=True)
    across(4.55, 5.35, 0.3, TOKEN, dashed=True)
    note(4.95, 1.4, "carried,\nno gradient\nat horizon 1", 8)
    label(
        5.0,
        -0.75,
        "blue: keys and values, which the next block reads; "
        "orange: gated states, which every later block can read",
        INK,
        9,
    )
    save("block_recurrent_flow", -0.4, 10.3, -1.0, 3.7)


def gates():
    """What trained gates keep and write over a document, and what that leaves of the facts.

    A line is a run. docs/gates.py made the record.
    """
    record = Path(__file__).parent / "figures" / "block_recurrent_gates.json"
    runs = json.loads(record.read_text(encoding="utf-8"))
    new_figure(10.6, 3.8)
    panels = (
        (0, ("kept", "written"), "share of a state, at each block"),
        (24, ("left",), "what later blocks have left of the facts"),
    )
    for left, shares, title in panels:
        frame(left + 9 / 32, 0, 16, 1, HIDDEN)  # 9 tokens of facts, 16 blocks of filler
        for run in runs:
            colour = STATE if run["gate"] == "lstm" else TOKEN
            for share in shares:
                blocks = left + 20.5 - len(run[share]) + np.arange(len(run[share]))
                style = "--" if share == "written" else "-"
                plt.plot(blocks, run[share], color=colour, linestyle=style, lw=1.2)
        label(left + 10, 1.13, title)
        note(left - 0.2, 0, "0", 8, ha="right")
        note(left - 0.2, 1, "1", 8, ha="right")
        for x, part in ((0.2, "facts"), (8.3, "512 tokens of filler"), (18.2, "questions")):
            note(left + x, -0.08, part, 8)
    label(8.3, 0.86, "LSTM gate keeps, $f_t$", STATE, 9)
    label(8.3, 0.1, "LSTM gate writes, $i_t$", STATE, 9)
    label(8.3, 0.67, "fixed gate keeps, $g$", TOKEN, 9)
    label(8.3, 0.33, "fixed gate writes, $1-g$", TOKEN, 9)
    label(24 + 11, 0.64, "LSTM gate", STATE, 9)
    label(24 + 7.5, 0.2, "fixed gate", TOKEN, 9)
    save("block_recurrent_gates", -0.8, 44.4, -0.15, 1.2)


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
    across(6.9, 5.6, 0.85, FAINT, bend=-0.4)
    note(6.2, 0.25, "3 rows compressed into 1")
    note(14.5, 0.25, "inputs become memory")
    across(13.6, 12.1, 0.85, FAINT, bend=-0.4)
    save("compressive_memories", -2.0, 16.6, -0.1, 11.8)


def shift():
    """The relative shift of three queries and six keys, by the reference's own function.

    Numbers are distances.
    """
    n = 3
    k = 6
    distance = np.broadcast_to(np.arange(k - 1, -1, -1.0), (1, 1, n, k))
    shifted, _ = compressive.relative_shift_forward(distance)
    seen = compressive.causal_mask(n, k)
    lost = compressive.relative_shift_backward(seen[None, None] * 1.0, None)[0, 0] == 0
    new_figure(10.2, 2.9)
    before = (0, distance[0, 0], lost, "scores by distance, far to near")
    after = (8, shifted[0, 0], ~seen, "scores by key, old to new")
    for left, grid, faint, title in (before, after):
        for i, j in np.ndindex(n, k):
            colour, ink = (HIDDEN, FAINT) if faint[i, j] else (TOKEN, "white")
            square(left + j, n - 1 - i, f"{grid[i, j]:.0f}", colour, ink, 10)
        label(left + k / 2, n + 0.4, title)
    across(6.3, 7.7, 1.5)
    label(7.0, 1.85, "shift")
    for i in range(n):
        note(-0.25, n - 0.5 - i, f"query {i}", ha="right")
    note(
        7,
        -0.5,
        "pale on the left: no key has this distance, so its gradient is zero; "
        "pale on the right: the mask",
    )
    save("compressive_shift", -1.8, 14.2, -0.9, n + 0.8)


def learning():
    """Which loss trains what: a row for each way of training the compression."""
    new_figure(10.6, 4.3)
    rows = (
        ("a loss of its own\n(attention, auto-encoding)", "own"),
        ("bptt", "task"),
        ("pooling, most-used", None),
    )
    for row, (name, compression) in enumerate(rows):
        y = 3.0 - 1.4 * row
        label(-0.2, y + 0.3, name, size=9, ha="right")
        box(0.2, y, 1.9, 0.6, "earlier segment:\nlayer inputs", TOKEN, 8)
        box(3.0, y, 1.5, 0.6, "memory", PREVIOUS)
        box(5.4, y, 1.5, 0.6, "$f_c$", GATE if compression else FAINT, 10)
        box(7.8, y, 1.9, 0.6, "compressed\nmemory", STATE, 8)
        box(10.6, y, 1.9, 0.6, "next segment:\ntask loss", TOKEN, 8)
        for start, stop in ((2.15, 2.95), (4.55, 5.35), (6.95, 7.75), (9.75, 10.55)):
            across(start, stop, y + 0.3)
        note(2.55, y + 0.5, "stop", 8)
        note(4.95, y + 0.5, "stop", 8)
        if compression != "task":
            note(7.35, y + 0.5, "stop", 8)
        if compression == "own":
            arrow(6.1, y - 0.35, 6.15, y - 0.05, STATE)
            label(6.15, y - 0.5, "compression loss", STATE, 8)
        if compression == "task":
            across(11.5, 6.2, y - 0.05, STATE, dashed=True, bend=-0.12)
            text = "task loss of the next segment, when one rollout holds both"
            label(8.9, y - 0.62, text, STATE, 8)
    save("compressive_learning", -2.6, 12.8, -0.4, 4.0)


def memformer_flow():
    """What the encoder reads and writes and what the decoder predicts, over three steps."""
    new_figure(11.2, 4.4)
    read = ("begin tokens $s_{-1}$", "segment $s_0$", "segment $s_1$")
    for t in range(3):
        x = 4.2 * t
        box(x, 0, 2.4, 0.6, read[t], TOKEN)
        box(x, 1.3, 2.4, 0.8, "encoder: reads\ntokens and memory", TOKEN)
        box(x, 3.0, 2.4, 0.8, f"step {t}: decoder\npredicts $s_{t}$", GATE)
        box(x + 2.9, 1.3, 0.8, 0.8, f"$M_{t + 1}$", STATE, 11)
        up(x + 1.2, 0.65, 1.25)
        up(x + 1.2, 2.15, 2.95)
        across(x + 2.45, x + 2.85, 1.7, STATE)
        label(x + 3.3, 2.35, "slot\nattention", STATE, 8)
        across(x - 0.8, x + 3.2, 1.25, STATE, bend=0.22)
        label(x + 2.5, 0.95, "each slot itself", STATE, 8, ha="left")
        if t < 2:
            across(x + 3.75, x + 4.15, 1.7, STATE)
    box(-1.5, 1.3, 0.8, 0.8, "$M_0$", STATE, 11)
    label(-1.1, 2.35, "learned", STATE, 8)
    across(-0.65, -0.05, 1.7, STATE)
    save("memformer_flow", -1.8, 12.5, -0.2, 4.1)


def memformer_slots(slots=4, tokens=8):
    """Which keys each slot sees: masked S x (S + N) scores, and what is computed, S x (1 + N)."""
    new_figure(10.6, 3.4)
    pattern = (0, slots, "the pattern of Figure 2c: S x (S + N)")
    computed = (14.5, 1, "what is computed: S x (1 + N)")
    for left, own, title in (pattern, computed):
        for i, j in np.ndindex(slots, own + tokens):
            is_slot = j < own
            x = left + j + (0 if is_slot else 0.5)
            colour = STATE if is_slot else TOKEN
            if is_slot and own > 1 and i != j:
                colour = HIDDEN
            frame(x, slots - 1 - i, 0.94, 0.94, colour)
        label(left + own / 2, slots + 0.4, "slots" if own > 1 else "itself", STATE, 9)
        label(left + own + 0.5 + tokens / 2, slots + 0.4, "encodings of $s_{t-1}$", TOKEN, 9)
        label(left + (own + tokens) / 2, -0.7, title)
        for i in range(slots):
            note(left - 0.25, slots - 0.5 - i, f"slot {i}", ha="right")
    plt.gca().set_aspect("equal")
    save("memformer_slots", -2.2, 24.6, -1.3, slots + 0.9)


def memories_in_a_row(y, count, last):
    """The first memories of a rollout; the last has a colour of its own."""
    for t in range(count):
        colour = last if t == count - 1 else STATE
        box(3.4 * t, y, 0.8, 0.6, f"$M_{t}$", colour, 10)


def first_pass(y):
    """A row of memory replay: the memory path alone keeps three memories."""
    memories_in_a_row(y, 3, STATE)
    for t in range(2):
        x = 3.4 * t
        box(x + 1.2, y, 1.6, 0.6, "encoder, writer", TOKEN, 8)
        across(x + 0.85, x + 1.15, y + 0.3)
        across(x + 2.85, x + 3.35, y + 0.3)


def replayed_step(y, replayed):
    """A row of memory replay: one step is computed whole, and its gradients go back through it."""
    after = replayed + 1
    memories_in_a_row(y, after + 1, FAINT if after < 3 else STATE)
    if after < 3:
        label(3.4 * after + 0.4, y - 0.28, f"$dM_{after}$", STATE, 10)

    x = 3.4 * replayed
    box(x + 1.2, y, 1.6, 0.6, "encoder, writer", TOKEN, 8)
    box(x + 1.2, y + 0.8, 1.6, 0.5, f"decoder, $\\ell_{replayed}$", GATE, 8)
    across(x + 0.85, x + 1.15, y + 0.4)
    across(x + 2.85, x + 3.35, y + 0.4)
    across(x + 3.35, x + 2.85, y + 0.12, STATE, dashed=True)
    across(x + 1.15, x + 0.85, y + 0.12, STATE, dashed=True)
    up(x + 2.0, y + 0.77, y + 0.63, GATE, dashed=True)
    label(x + 0.4, y - 0.28, f"$dM_{replayed}$", STATE, 10)


def memformer_replay():
    """Memory replay over three steps: what is computed, what is kept, where gradients go."""
    new_figure(11.4, 6.4)
    names = (
        "first pass: memory path\nalone, no gradient",
        "back through step 2:\nall of it computed",
        "back through step 1",
        "back through step 0",
    )
    for row, name in enumerate(names):
        y = 5.4 - 1.8 * row
        label(-0.5, y + 0.3, name, size=9, ha="right")
        if row == 0:
            first_pass(y)
        else:
            replayed_step(y, replayed=3 - row)
    note(
        5.2,
        -0.75,
        "solid: computed; dashed: gradient. "
        "The graph of a step is gone before the next one is built; "
        "the orange boxes are all that is kept.",
    )
    save("memformer_replay", -3.4, 11.4, -1.0, 6.9)


def lookup():
    """One query's lookup: its similarity to each row of the memory, the K nearest, and the gate."""
    # of unit keys, by hand
    similarity = np.array([0.2, -0.5, 0.9, 0.1, -0.3, 0.4, -0.8, 0.7, 0.0, -0.1, 0.3, -0.6])
    nearest = np.sort(similarity)[-3:]
    new_figure(10.6, 4.2)
    for j, value in enumerate(similarity):
        found = value in nearest
        frame(j, 2.0, 0.94, 0.7, STATE if found else HIDDEN)
        label(j + 0.47, 2.35, f"{value:.1f}", "white" if found else FAINT, 9)
        if found:
            arrow(j + 0.47, 1.95, 8.7, 0.5, STATE)
    for j in range(8):
        colour = PREVIOUS if j < 4 else TOKEN
        frame(12.6 + 0.75 * j, 2.0, 0.69, 0.7, colour)
        if 1 <= j <= 4:
            arrow(12.95 + 0.75 * j, 1.95, 14.9, 0.5, colour)
    label(6, 3.3, "memory: M keys and values, as they were; the numbers are q·k", STATE)
    note(6, 2.95, "oldest to newest, without positions, without gradient")
    label(15.6, 3.3, "last segment, this segment", TOKEN)
    note(15.6, 2.95, "the N tokens before the query, here 4, with positions")
    label(12.6 + 0.75 * 5.46, 2.35, "q", "white", 10)
    note(10, 1.65, "the last N rows are\nthe last segment's")
    box(6.5, -0.2, 4.4, 0.65, "softmax over K = 3: found", STATE)
    box(13.1, -0.2, 3.8, 0.65, "softmax over N: local", TOKEN)
    box(9.6, -1.7, 4.8, 0.65, "gate: found g + local (1 − g)", GATE)
    arrow(9.4, -0.25, 11.0, -1.0, STATE)
    arrow(14.4, -0.25, 12.8, -1.0, TOKEN)
    label(3.2, 0.1, "q meets all M keys;\nonly the three nearest count", INK, 9)
    save("memorizing_lookup", -0.4, 19.0, -1.9, 3.6)


def windows_and_vectors():
    """Three windows of GPT-2: what is pooled, the network, and the layer that sees its output."""
    new_figure(11.4, 5.2)
    for t in range(3):
        x = 4.4 * t
        for layer in range(4):
            box(x, 0.9 * layer + 0.9, 2.4, 0.6, f"layer {layer + 1}", TOKEN)
            up(x + 1.2, 0.9 * layer + 0.65, 0.9 * layer + 0.87)
        label(x + 1.2, 0.4, f"window {t}: T tokens", INK, 9)
        up(x + 1.2, 4.25, 4.6)
        label(x + 1.2, 4.8, "predictions", GATE, 9)
        if t == 2:
            continue
        for layer in range(4):
            arrow(x + 2.45, 0.9 * layer + 1.2, x + 2.75, 3.0, PREVIOUS)
        box(x + 2.8, 2.7, 0.7, 0.6, f"$z_{t}$", STATE, 10)
        box(x + 2.8, 1.5, 1.0, 0.6, f"$h_{{prev,{t}}}$", STATE)
        up(x + 3.1, 2.65, 2.15, STATE)
        label(x + 3.2, 2.4, "network", STATE, 8, ha="left")
        label(x + 3.15, 3.55, "pooled", STATE, 8)
        arrow(x + 3.85, 1.8, x + 4.35, 2.0, STATE)
    note(
        5.6,
        -0.25,
        "every layer's output is pooled over positions and layers (Eq. 1); "
        "one layer of the next window has a key and value more",
    )
    save("pretrained_recurrence_flow", -0.3, 11.6, -0.5, 5.1)


def overlaps(window=3, length=8):
    """Figure 3: which inputs each prediction sees, from the reference's own windows.

    At overlap 0, T - 1 and in between.
    """
    new_figure(11.4, 5.4)
    last = window - 1
    titles = {0: "overlap 0: disjoint", last: f"overlap {last}: token by token", 1: "overlap 1"}
    for place, (overlap, title) in enumerate(titles.items()):
        config = pretrained_recurrence.Config(segment=window, overlap=overlap, max_positions=window)
        windows = pretrained_recurrence.windows_of(config, np.arange(length)[None])
        left = place * (length + 2.5)
        label(left + length / 2, 0.4, title, INK, 11)
        for row, shown in enumerate(windows):
            window_row(left, -1.35 * (row + 1), shown)
    note(
        1.5 * length + 2.5,
        -8.0,
        "a row is a window: below what it reads, above what it predicts. "
        "Green counts; every token after the first is green once;"
        "\npale predictions were another window's, pale inputs are read again",
        10,
    )
    save("pretrained_recurrence_overlap", -0.5, 3 * length + 5.4, -8.6, 0.9)


def window_row(left, y, window):
    """A window: what it reads, and above that what it predicts."""
    pairs = zip(window.tokens[0], window.targets[0], window.scored[0], strict=True)
    for token, target, scored in pairs:
        colour, ink = (TOKEN, "white") if scored else (PREVIOUS, INK)
        frame(left + token, y, 0.9, 0.45, colour)
        label(left + token + 0.45, y + 0.22, str(token), ink, 8)
        colour, ink = (GATE, "white") if scored else (HIDDEN, FAINT)
        frame(left + target - 0.05, y + 0.53, 0.9, 0.45, colour)
        label(left + target + 0.4, y + 0.75, str(target), ink, 8)


def window_of_tokens(x, part, chosen, largest):
    """What a window of RoBERTa reads; arrows lead from [CLS] and from its part of the text up."""
    tokens = (
        (0, 0.62, "[CLS]", GATE, largest),
        (0.66, 0.56, "key?", STATE, None),
        (1.26, 0.6, "[SEP]", FAINT, None),
        (1.9, 1.5, part, TOKEN, chosen),
    )
    for left, width, text, colour, top in tokens:
        box(x + left, 0.2, width, 0.7, text, colour, 7)
        if top:
            middle = x + left + width / 2
            up(middle, 3.5, top, GATE)


def question_windows():
    """Three windows of RoBERTa: each reads the question and a part of the text.

    A vector goes from window to window; an answer is chosen over all of them.
    """
    new_figure(11.4, 5.6)
    parts = (
        "Name: key parser.\nTest: a line of the",
        "standard library.\nTest: another line",
        "File: server path,\nparser module, …",
    )
    chosen = 4.55
    largest = 5.35
    frame(0, chosen, 12.6, 0.5, HIDDEN)
    label(7.2, 4.8, "start and end: softmax over all text: “module”", GATE, 9)
    frame(0, largest, 12.6, 0.5, HIDDEN)
    text = "maximum of the [CLS] outputs so far; after the last window: a span, yes or no?"
    label(6.3, 5.6, text, GATE, 9)
    for number, part in enumerate(parts):
        x = 4.6 * number
        window_of_tokens(x, part, chosen, largest)
        for layer in range(3):
            box(x, 0.85 * layer + 1.2, 3.4, 0.5, f"layer {layer + 1}", TOKEN)
            up(x + 1.7, 0.85 * layer + 0.93, 0.85 * layer + 1.2)
        label(x + 1.7, -0.15, f"window {number}", INK, 9)
        if number < 2:
            box(x + 3.75, 2.9, 0.6, 0.5, f"$z_{number}$", STATE, 10)
            across(x + 3.42, x + 3.75, 3.15, STATE)
            arrow(x + 4.05, 2.88, x + 4.58, 2.35, STATE)
            label(x + 3.85, 2.25, "network", STATE, 8)
    note(
        6.3,
        -0.7,
        "z is the mean of the final layer; layer 2 of the next window has one key and value "
        "more. Window 0 says who has the key",
    )
    save("pretrained_recurrence_questions", -0.2, 12.8, -0.95, 6.0)


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


def bands():
    """WikiText-103's tables with the cutoffs of Baevski and Auli.

    A band's height is the square root of its words.
    """
    config = compressive.Config(vocabulary=267_735, width=1024, cutoffs=(20_000, 60_000))
    new_figure(8.4, 4.2)
    y = 0.0
    for band, (start, stop) in enumerate(compressive_variants.bands_of(config)):
        height = (stop - start) ** 0.5 / 100
        width = 4 / config.div_value**band
        y -= height + 0.25
        middle = y + height / 2
        frame(0, y, width, height, STATE if band else TOKEN)
        words = f"words {start:,} to {stop - 1:,}: width {config.width // config.div_value**band:,}"
        label(-0.2, middle, words, size=9.5, ha="right")
        if band:
            frame(1.6, middle - 0.25, 0.9, 0.5, PREVIOUS)
            label(2.05, middle, "P")
            across(width, 1.6, middle)
            across(2.5, 4.6, middle)
            label(4.7, middle, f"cluster {band}, then a word of it", ha="left")
        else:
            across(width, 4.6, middle)
            label(4.7, middle, "the most frequent words", ha="left")
    save("compressive_bands", -4.2, 8.4, y - 0.2, 0.2)


PICTURES = (
    four_memories,
    cards,
    bands,
    mask_tile,
    cell,
    flow,
    gates,
    memories,
    shift,
    learning,
    memformer_flow,
    memformer_slots,
    memformer_replay,
    lookup,
    windows_and_vectors,
    overlaps,
    question_windows,
)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
