"""Adding Recurrence to Pretrained Transformers: Tables 1 and 2 by overlap, Figures 4 and 5 by window, other modules, topics."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.lab.markdown import markdown_table
from accelerated.lab.tables.page import mean_and_spread, mean_of, results, wrapped
from accelerated.lab.tables.table import GPU, SMALL, Measure, Ordering, Row, Scale, Table
from accelerated.training.log import figure_class, plain_axes, save_figure

# One GPT-2 is pretrained on long windows; every row fine-tunes it, with or without recurrence, at a window and an overlap
LAYERS = {"small": 4, "gpu": 8}
PRETRAINING = {
    "small": f"--model pretrained_recurrence {SMALL} --layers {LAYERS['small']} --max-positions 128 --segment 128 --vectors 0 "
    "--batch 32 --steps 2000 --warmup 200 --learning-rate 0.004",
    "gpu": f"--model pretrained_recurrence {GPU} --layers {LAYERS['gpu']} --max-positions 512 --segment 512 --vectors 0 "
    "--batch 64 --steps 2000 --warmup 200 --learning-rate 0.001",
}
STEPS = {"small": 600, "gpu": 300}  # of fine-tuning
FINE_TUNING = {
    "small": f"--init {{first}} --steps {STEPS['small']} --warmup 60 --horizon 4",
    "gpu": f"--init {{first}} --steps {STEPS['gpu']} --warmup 30 --horizon 8 --backprop memory_replay",
}
FINE_RATES = ("--learning-rate 0.0001", "--learning-rate 0.0003", "--learning-rate 0.001")
RECURRENT = "--vectors 1 --module-width {module}"  # hidden layers a quarter of the model's width, as in the paper (200 and 768)
MODULE = {"small": {"module": 16}, "gpu": {"module": 128}}


def number(name: str) -> Callable[[dict], float]:
    """The pick of a number of the test split from the JSON of eval.py overlap."""
    return lambda answer: answer["rows"][0]["splits"]["test"][name]


OVERLAP = "overlap --split test --overlaps {o}"
MEASURES = (
    Measure("test, bits per byte", number("bits_per_byte"), OVERLAP, ".4f"),
    Measure("perplexity per word", number("word_perplexity"), OVERLAP, ".3g"),
    Measure("FLOPs per token", lambda answer: answer["rows"][0]["counted_flops_per_token"], OVERLAP, ".3g"),
)


def scales(sizes: dict[str, dict[str, Any]], grid: tuple[str, ...] = FINE_RATES) -> dict[str, Scale]:
    """The scales of a table, from the sizes of each."""
    return {name: Scale(FINE_TUNING[name], MODULE[name] | sizes[name], grid, PRETRAINING[name]) for name in PRETRAINING}


SHARES = ("0", "5", "10", "30", "50", "75", "100", "150", "200")  # the paper's overlaps of windows of 300
BOTH = ("0", "5", "10", "30", "50")  # overlaps of recurrent rows; the others are the baseline's alone
PAPER = {  # overlap: perplexity on the test splits of WikiText-103 and PG-19
    "GPT-2": {"0": "30.47; 147.71", "5": "29.36; 142.30", "10": "28.88; 139.49", "30": "27.96; 134.30", "50": "27.31; 131.25",
              "75": "-; 128.46", "100": "-; 126.51", "150": "-; 123.53", "200": "-; 121.40"},
    "recurrent": {"0": "29.01; 133.02", "5": "28.12; 128.78", "10": "27.77; 127.05", "30": "27.12; 122.22",
                  "50": "26.73; 119.93"},
}  # fmt: skip


def overlaps_of_window(window: int) -> dict[str, int]:
    """The overlaps of a window that stand for each of SHARES of the paper's 300 tokens: the nearest, but at least 1 for any."""
    return {f"o{share}": max(min(1, int(share)), round(int(share) * window / 300)) for share in SHARES}


def sizes_with_overlap(scale: str, window: int, lanes: int) -> dict[str, int]:
    """Window, lanes and overlaps, and for each overlap as many steps as read the text of STEPS without one."""
    overlaps = overlaps_of_window(window)
    steps = {f"steps at {name}": round(STEPS[scale] * window / (window - overlap)) for name, overlap in overlaps.items()}
    return {"T": window, "lanes": lanes} | overlaps | steps


OF_T = "--segment {T} --batch {lanes}"
TABLES_1_AND_2 = Table(
    title="Adding Recurrence to Pretrained Transformers, Tables 1 and 2",
    about="""What does one vector from window to window add to a pretrained GPT-2, at each overlap of the windows? A small GPT-2
    is pretrained once, on longer windows; every row is fine-tuned from it on as many new tokens. The plain rows are one model,
    fine-tuned on disjoint windows and read at several overlaps; a recurrent row is trained with the overlap at which it is
    read. Overlaps are those of the paper's windows of 300 tokens; windows of 60 share a fifth of that. The paper's column is
    the perplexity on the test splits of WikiText-103 and PG-19. Seeds share the pretraining. FLOPs are counted, the module's
    too.""",
    rows=(
        *(Row(f"GPT-2, {share}", f"{OF_T} --vectors 0", PAPER["GPT-2"][share], {"o": f"{{o{share}}}"}) for share in SHARES),
        *(Row(f"recurrent, {share}", f"{OF_T} {RECURRENT} --overlap {{o{share}}} --steps {{steps at o{share}}}",
              PAPER["recurrent"][share], {"o": f"{{o{share}}}"}) for share in BOTH),
    ),
    measures=MEASURES,
    orderings=(
        *(Ordering(f"recurrence helps at overlap {share}", f"recurrent, {share}", f"GPT-2, {share}") for share in BOTH),
        *(Ordering(f"overlap {b} is better than {a} for GPT-2", f"GPT-2, {b}", f"GPT-2, {a}")
          for a, b in pairwise(SHARES)),
        *(Ordering(f"overlap {b} is better than {a} with recurrence", f"recurrent, {b}", f"recurrent, {a}")
          for a, b in pairwise(BOTH)),
        Ordering("recurrence at 0 is as good as GPT-2 at 30 (PG-19)", "recurrent, 0", "GPT-2, 30"),
        Ordering("recurrence at 5 is better than GPT-2 at 75 (PG-19)", "recurrent, 5", "GPT-2, 75"),
    ),
    scales=scales({"small": sizes_with_overlap("small", 60, 16), "gpu": sizes_with_overlap("gpu", 300, 28)}),
)  # fmt: skip

WINDOW_RATES = (*FINE_RATES, "--learning-rate 0.003")  # small windows take a higher one
WINDOWS = {"small": (16, 32, 64, 128), "gpu": (64, 128, 256, 512)}
TOKENS = {"small": 1024, "gpu": 8192}  # of a segment in all lanes: every row reads as many
PLACES = ("T / 8", "T / 4", "T / 2", "T")  # the windows, of which T is that of pretraining


def sizes_of_windows(scale: str) -> dict[str, int]:
    """The windows of a scale, with the lanes and overlaps of each."""
    found = {}
    for place, window in zip(PLACES, WINDOWS[scale], strict=True):
        found |= {place: window, f"lanes of {place}": TOKENS[scale] // window}
        found |= {f"{name} of {place}": overlap for name, overlap in overlaps_of_window(window).items()}
    return found


def sizes_of_modules(scale: str) -> dict[str, Any]:
    """The smallest window of a scale, with its lanes, overlaps and steps, and the layers of its model."""
    window, layers = WINDOWS[scale][0], LAYERS[scale]
    own = sizes_with_overlap(scale, window, TOKENS[scale] // window)
    return own | {"every layer": ",".join(map(str, range(1, layers + 1))), "last layer": layers}


class Point(NamedTuple):
    """A row as Figure 5 shows it: means of the seeds."""

    flops: float  # per token
    bits: float  # per byte
    name: str


def points_of(record: dict) -> list[Point]:
    """The points of a record's rows."""
    means = ({title: mean_of(values) for title, values in row["measured"].items()} for row in record["rows"])
    titles = MEASURES[2].title, MEASURES[0].title
    return [Point(*(mean[title] for title in titles), row["name"]) for mean, row in zip(means, record["rows"], strict=True)]


def pareto_line(points: list[Point]) -> list[Point]:
    """The points that no other one is better than for as many FLOPs or fewer, cheap ones first."""
    best, line = math.inf, []
    for point in sorted(points):
        if point.bits < best:
            best = point.bits
            line.append(point)
    return line


def windows_and_line(table: Table, record: dict) -> str:
    """The measured numbers, and which rows are on the Pareto line."""
    names = "; ".join(point.name for point in pareto_line(points_of(record)))
    return results(table, record) + "\n\n" + wrapped(f"On the Pareto line of Figure 5, cheap ones first: {names}.")


def draw_windows(record: dict, path: Path) -> None:
    """Draw Figure 4, loss by window, and Figure 5, loss by FLOPs with the Pareto line."""
    figure = figure_class()(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = map(plain_axes, figure.subplots(1, 2, sharey=True))
    points = points_of(record)
    for kind in KINDS:
        own = [point for point in points if point.name.rpartition(", ")[0] == kind]
        if kind in ("GPT-2", "recurrent"):
            left.plot(PLACES, [point.bits for point in own], marker="o", label=kind)
        right.plot([point.flops for point in own], [point.bits for point in own], marker="o", label=kind)
    line = pareto_line(points)
    right.plot([point.flops for point in line], [point.bits for point in line], color="0.3", linestyle=":", label="Pareto line")
    left.set(xlabel="window", ylabel="test, bits per byte", title="Figure 4: by window")
    right.set(xlabel="FLOPs per token", title="Figure 5: by FLOPs")
    left.legend(frameon=False)
    right.legend(frameon=False)
    save_figure(figure, path)


KINDS = {"GPT-2": ("--vectors 0", 0), "recurrent": (RECURRENT, 0), "GPT-2, overlap 10": ("--vectors 0", 10),
         "GPT-2, overlap 30": ("--vectors 0", 30), "GPT-2, overlap 50": ("--vectors 0", 50)}  # fmt: skip
FIGURES = Table(
    title="Adding Recurrence to Pretrained Transformers, Figures 4 and 5",
    about="""How does the loss depend on the window, with and without recurrence (Figure 4), and what does a FLOP buy (Figure 5)?
    Rows are fine-tuned from one pretrained GPT-2 with windows of an eighth, a quarter, a half and all of its own; overlaps are
    those of the paper's windows of 300, in proportion. The paper finds the gain of recurrence to grow as windows shrink, and all
    recurrent models on the Pareto line.""",
    rows=tuple(
        Row(f"{kind}, {place}", f"{options} --segment {{{place}}} --batch {{lanes of {place}}}",
            sizes={"o": f"{{o{share} of {place}}}"})
        for kind, (options, share) in KINDS.items() for place in PLACES
    ),
    measures=MEASURES,
    orderings=(
        *(Ordering(f"recurrence helps with windows of {place}", f"recurrent, {place}", f"GPT-2, {place}") for place in PLACES),
        *(Ordering(f"it helps more with windows of {a} than of {b}", f"GPT-2, {b} - recurrent, {b}",
                   f"GPT-2, {a} - recurrent, {a}") for a, b in pairwise(PLACES)),
    ),
    scales=scales({name: sizes_of_windows(name) for name in WINDOWS}, WINDOW_RATES),
    results=windows_and_line,
    draw=draw_windows,
)  # fmt: skip

MODULES = {  # {row: options beside those of the paper's module}
    "as published": "", "max pooling": "--pooling max", "attention pooling": "--pooling attention",
    "four vectors": "--vectors 4", "at all layers": "--insertion-layers {every layer}",
    "at the last layer": "--insertion-layers {last layer}",
}  # fmt: skip
POOLED = "overlap --split test --overlaps {o} {positions}"
OTHERS = Table(
    title="Adding Recurrence to Pretrained Transformers, 3.1 and 4.2: other modules",
    about="""Is another way to carry a window's text to the next one better than the mean of its positions, inserted as one vector
    at the second layer? The paper tried those of 3.1 and found none significantly better; in its note 4 one of the last layers
    is slightly worse. And with overlapping windows, must a model be trained as it is read? In the last row but one it is. The
    last row is the published model, trained without overlap; read with it, it pools only what the next window does not read
    again, which in the paper's note 3 is slightly worse. Windows are the smallest of Figure 4, where the vector is worth most;
    all rows read as many new tokens.""",
    rows=(
        *(Row(name, f"{OF_T} {RECURRENT} {options}", sizes={"o": "0", "positions": ""}) for name, options in MODULES.items()),
        Row("overlap, trained with it", f"{OF_T} {RECURRENT} --overlap {{o50}} --steps {{steps at o50}}",
            sizes={"o": "{o50}", "positions": ""}),
        Row("overlap, other positions", f"{OF_T} {RECURRENT}", sizes={"o": "{o50}", "positions": "--pool advance"}),
    ),
    measures=tuple(measure._replace(report=POOLED) for measure in MEASURES),
    orderings=(
        *(Ordering(f"no better: {name}", "as published", name) for name in MODULES if name != "as published"),
        Ordering("with overlap, training as it is read is better", "overlap, trained with it", "overlap, other positions"),
    ),
    scales=scales({name: sizes_of_modules(name) for name in WINDOWS}, WINDOW_RATES),
)  # fmt: skip

TOPIC_WORDS = "topics --split test --contexts 1000 --tokens 60"
DIVERGENCES = "divergences"


def sign_test(nearer: int, farther: int) -> float:
    """The two-sided probability that a fair coin is as uneven."""
    count, fewer = nearer + farther, min(nearer, farther)
    return min(1.0, 2 * sum(math.comb(count, k) for k in range(fewer + 1)) / 2**count)


def topic_results(table: Table, record: dict) -> str:
    """Each row's mean divergence, and for each seed in how many contexts the recurrent model's is lower."""
    means, divergences = ({row["name"]: row["measured"][m.title] for row in record["rows"]} for m in table.measures)
    rows = []
    for seed, (plain, recurrent) in enumerate(zip(divergences["GPT-2"], divergences["recurrent"], strict=True)):
        if plain is None or recurrent is None:  # one of the runs diverged
            continue
        nearer, farther = (sum(sign * (a - b) > 0 for a, b in zip(plain, recurrent, strict=True)) for sign in (1, -1))
        share = f"{nearer / max(1, nearer + farther):.1%}"
        rows.append([f"{seed}", f"{nearer:,}", f"{farther:,}", share, f"{sign_test(nearer, farther):.2g}"])
    form = table.measures[0].form
    first = markdown_table(["", table.measures[0].title], *([name, mean_and_spread(own, form)] for name, own in means.items()))
    return f"{first}\n\n" + markdown_table(["seed", "recurrent nearer", "plain nearer", "share", "sign test, p"], *rows)


TOPICS = Table(
    title="Adding Recurrence to Pretrained Transformers, 5.3.1: topics",
    about="""Does the vector carry the topic? A context of one window from the test split is continued greedily, in a new window
    that begins with its last token, and with recurrence has its vector besides. A topic model of 20 topics (latent Dirichlet
    allocation), fitted to 5,000 pieces of the training split, gives the topics of context and continuation; their
    Jensen-Shannon divergence is in bits, 0 to 1. The paper, with 8,000 contexts of 300 tokens from PG-19 and continuations of
    30: 0.5331 with recurrence, 0.5951 without, and recurrence is nearer at least 60% of the time. The rows are those of Table 1
    without overlap, whose tokens are bytes; a continuation has 60 of them. The same texts are continued by both; where both are
    as near, neither counts.""",
    rows=(
        Row("GPT-2", f"{OF_T} --vectors 0"),
        Row("recurrent", f"{OF_T} {RECURRENT} --overlap 0"),
    ),
    measures=(
        Measure("divergence of topics", lambda answer: answer["mean"], TOPIC_WORDS, ".4f"),
        Measure(DIVERGENCES, lambda answer: answer["divergences"], TOPIC_WORDS),
    ),
    orderings=(Ordering("recurrence keeps nearer to the topic", "recurrent", "GPT-2"),),
    scales=scales({"small": {"T": 60, "lanes": 16}, "gpu": {"T": 300, "lanes": 28}}),
    timed=False,
    results=topic_results,
)

TABLES = {
    "pretrained_recurrence-1-2": TABLES_1_AND_2, "pretrained_recurrence-4-5": FIGURES,
    "pretrained_recurrence-modules": OTHERS, "pretrained_recurrence-topics": TOPICS,
}  # fmt: skip
