"""The page and the picture of the memory experiment, made from the rows and seeds in its record.

    python -m accelerated.lab.memory_page docs/results/memory.json

writes memory.md and memory.svg beside the record, of whatever it has by then.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.lab.pages import markdown_table, wrapped
from accelerated.program.files import written_whole

TITLE = "Which memory waits, which holds and which overwrites?"
COLUMNS = ("near", "128", "hold", "wait", "overwrite", "old value", "keep", "distractors")
TASKS = {
    "hold": "holds",
    "wait": "waits",
    "overwrite": "overwrites",
    "distractors": "sees past noise",
}
DISTANCES = {"near": 32, "128": 128, "512": 512, "2048": 2048, "hold": 8192}
NAMED = 4  # lines of the second panel that have names
ABOUT = """Four facts, each @ with a key and a value, are asked for after 32 tokens of filler, near,
and after 128, which attention alone does not span. Hold: after 8,192. The others change one thing
of 128. Wait: 8,192 tokens of filler come before the facts. Overwrite: one of the four is told again
with another value, anywhere in the filler, and asked for; old value is the share of answers that
give the value before. Keep: the other three are asked for. Distractors: a fifth of the filler are
keys and values without the @. A document draws its keys and values from one alphabet of ten bytes,
so who knows which bytes are its keys guesses 17%. Each number is of 64 documents of 16
questions."""


COMMANDS = """```bash
python -m accelerated.lab.memory --out docs/results
python -m accelerated.lab.memory_page docs/results/memory.json
```"""


def page(record: dict) -> str:
    """The page, in Markdown."""
    settings = record["settings"]
    smallest = f"{100 * settings['smallest_difference']:.0f} points between means over the seeds"
    blocks = [
        f"# {TITLE}",
        f"![{TITLE}](memory.svg)",
        wrapped(f"**{answer(record)}**"),
        table(record),
        wrapped(f"**What was measured.** {ABOUT} {protocol(settings)}"),
        wrapped(f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}."),
        COMMANDS,
        wrapped(
            f"**The smallest difference worth knowing**, fixed before the first run, is {smallest}."
        ),
    ]
    return "\n\n".join(blocks) + "\n"


def protocol(settings: dict) -> str:
    """How the rows were trained, in words."""
    sizes = {row["state_bytes"] for row in settings["rows"].values()}
    parameters = [row["parameters"] for row in settings["rows"].values()]
    updates = [
        f"{name} ({', '.join(f'{steps:,}' for _, steps in parts)} updates)"
        for name, parts in settings["stages"].items()
    ]
    return (
        f"All rows read the same tokens: {settings['batch']} documents an update, in segments of "
        f"{settings['segment']}. The stages are {'; '.join(updates)}, each from the weights of the "
        f"one before. A state is all that a segment passes to the next, {min(sizes):,} to "
        f"{max(sizes):,} bytes. Models have {min(parameters):,} to {max(parameters):,} parameters. "
        "Rates are tuned on seed 99, which is not shown."
    )


def answer(record: dict) -> str:
    """What each row does after its last stage, of the seeds that are there."""
    last = [*record["settings"]["stages"]][-1]
    said = []
    for row, runs in record["runs"].items():
        values = after(runs, last)
        if values:
            said.append(f"{row} ({counted(len(values))}) {does(values)}.")
    if not said:
        return "No run has ended yet."
    rule = "A memory does what more than half of its answers get right, in the mean of its seeds."
    return f"{rule} After all four stages: {' '.join(said)}"


def does(values: list[dict]) -> str:
    """What a memory does and what it does not, in words."""
    if mean(values, "near") <= 0.5:
        return "has not learned the task at 32 tokens, so no more is told of it"
    able = [words for name, words in TASKS.items() if mean(values, name) > 0.5]
    return " and ".join(able) if able else "does none of it"


def counted(seeds: int) -> str:
    """'one seed', or how many."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def after(runs: dict, stage: str) -> list[dict]:
    """The shares of right answers after a stage, of each seed that has them."""
    return [each["right"] for stages in runs.values() for each in stages if each["stage"] == stage]


def mean(values: list[dict], name: str) -> float:
    """The mean of one share."""
    return statistics.mean(each[name] for each in values)


def table(record: dict) -> str:
    """All numbers: means over the seeds that are there, with the least and the most."""
    rows = []
    for row, runs in record["runs"].items():
        for stage in record["settings"]["stages"]:
            values = after(runs, stage)
            if values:
                cells = [cell([each[name] for each in values]) for name in COLUMNS]
                rows.append([row, stage, str(len(values)), *cells])
    return markdown_table(["right answers", "after", "seeds", *COLUMNS], *rows)


def cell(shares: list[float]) -> str:
    """'mean (least..most)', in percent, or the only one."""
    if len(shares) == 1:
        return f"{shares[0]:.0%}"
    spread = f"{100 * min(shares):.0f}..{100 * max(shares):.0f}"
    return f"{statistics.mean(shares):.0%} ({spread})"


def draw(record: dict, path: Path) -> None:
    """Draw hold against overwrite, from stage to stage, and recall by distance."""
    figure, (paths, lines) = new_figure(2)
    rows = {row: runs for row, runs in record["runs"].items() if runs}
    for number, (row, runs) in enumerate(rows.items()):
        draw_path(paths, record, row, runs, f"C{number}")
    paths.set(
        xlabel="overwrite: new values after a rewrite", ylabel="hold: right after 8,192 tokens"
    )
    paths.set_title("After stages 1 to 4; a larger mark: more are right in noise", fontsize=9)
    paths.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    draw_distances(lines, record, rows)
    save_figure(figure, path)


def draw_path(axes: Any, record: dict, row: str, runs: dict, colour: str) -> None:
    """Draw a row's mean after each stage, joined, and its seeds as small marks."""
    means = []
    for stage in record["settings"]["stages"]:
        values = after(runs, stage)
        if not values:
            continue
        xs = [each["overwrite"] for each in values]
        ys = [each["hold"] for each in values]
        axes.scatter(xs, ys, s=4, color=colour, alpha=0.5, linewidths=0)
        means.append((statistics.mean(xs), statistics.mean(ys), mean(values, "distractors")))
    if means:
        xs, ys, noise = zip(*means, strict=True)
        axes.plot(xs, ys, color=colour, linewidth=1, label=row)
        axes.scatter(xs, ys, s=[10 + 80 * share for share in noise], color=colour, alpha=0.5)
        for number, place in enumerate(zip(xs, ys, strict=True), start=1):
            axes.annotate(str(number), place, fontsize=6, ha="center", va="center")


def draw_distances(axes: Any, record: dict, rows: dict) -> None:
    """Draw recall by distance after the first stage; the best at 2,048 tokens have names."""
    first = next(iter(record["settings"]["stages"]))
    found = {row: values for row, runs in rows.items() if (values := after(runs, first))}
    best = sorted(found, key=lambda row: -mean(found[row], "2048"))[:NAMED]
    for number, row in enumerate(rows):
        if row not in found:
            continue
        shares = [mean(found[row], name) for name in DISTANCES]
        colour = f"C{number}" if row in best else "0.75"
        label = row if row in best else None
        axes.plot(list(DISTANCES.values()), shares, "o-", markersize=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(DISTANCES.values()), [f"{each:,}" for each in DISTANCES.values()])
    axes.set(xlabel="tokens from facts to questions", ylabel="right answers")
    axes.set_title(f"Recall by distance, after: {first}", fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def main(path: Path) -> None:
    """Write the page and the picture of the record at path."""
    record = json.loads(path.read_text())
    draw(record, path.with_suffix(".svg"))
    with written_whole(path.with_suffix(".md")) as temporary:
        temporary.write_text(page(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
