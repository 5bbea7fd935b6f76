"""The page and the picture of the memory experiment, made from the rows and seeds in its record.

    python -m accelerated.lab.memory_page docs/results/memory.json

writes memory.md and memory.svg beside the record, of whatever it has by then.
"""

import functools
import statistics
import sys
from pathlib import Path
from typing import Any

from accelerated.evaluation.figures import new_figure, save_figure
from accelerated.lab.harness import HEADLINE_SEEDS, read_record, write_page
from accelerated.lab.memory import SIMPLEST, ask, one_answer
from accelerated.lab.pages import label_ends, laid_out, markdown_table, wrapped

TITLE = "Which memory waits, which holds and which overwrites?"
OVERWRITE = "overwrite, later"
COLUMNS = {  # heading: test
    "near": "near",
    "128": "128",
    "hold": "hold",
    "wait": "wait",
    "overwrite": OVERWRITE,
    "old value": "old value, later",
    "keep": "keep, later",
    "distractors": "distractors",
}
SAYS = {  # what a row does: the tests in which it gives more than half of the answers
    "holds": ["hold"],
    "waits": ["wait"],
    "overwrites": [OVERWRITE, "keep, later"],
    "finds facts among noise": ["distractors"],
}
HALF = 0.5  # of the answers
SAID_OF = """A memory *holds* if it answers 8,192 tokens after the facts, *waits* if it takes in
facts after 8,192 tokens without any, *overwrites* if it gives a fact's new value and keeps the
other facts, and *finds facts among noise* if it answers among distractors. A row does so if more
than half of its answers are right, in the mean of its seeds, after all four stages."""
SKILLS = {  # what a stage teaches: (the stage, what stands in its documents, the tests)
    "wait": ("anywhere", "Facts that come late", SAYS["waits"]),
    "overwrite": ("rewritten", "Facts that are told again", SAYS["overwrites"]),
}
DISTANCES = {"near": 32, "128": 128, "512": 512, "2048": 2048, "hold": 8192}
COLOURS = [f"C{number}" for number in range(10) if number != 7]  # which is grey
NAMED = 4  # lines of the second panel that have names
SEEDS = len(HEADLINE_SEEDS)  # of a whole experiment
ABOUT = """Four facts, each an @ with a key and a value, are asked for after 32 tokens of filler
(near), after 128, and after 8,192 (hold). No layer's attention spans 128 tokens but Compressive's,
whose rows stand for 160: it can wait as any queue does, by dropping what came before. But
Transformer-XL and Memorizing, for which 32 KiB have room for 64 rows, only guess beyond near.
Wait and distractors change one thing at 128. Wait puts 8,192 tokens of filler before the facts. For
distractors a fifth of the filler are keys and values without the @. From overwrite to keep 256
tokens of filler follow the facts, and somewhere in the first 128 of them one of the four is told
again with another value. Overwrite is the share of answers that give its new value, and old value
of those that give its first; keep asks for the other three, across all 256. (If the questions came
right after the first 128, most new values would stand within attention's reach: Memorizing, which
guesses at 128, then knows more than half of them. And if wait asked after 32 tokens, any queue of
rows would wait for ever. The [record](memory.json) has both.) Each number is of 64 documents of 16
questions; where a fact was told again about a quarter ask for it, and the others are keep's."""
GUESSES = """A document draws its keys and values from one alphabet of ten bytes, so knowing only
which bytes are its keys makes 17% of the answers right. The first two rows know no key at all: to
every question one answers with the value that was told most often, the other with the value told
last. What they get is no sign of knowing which value belongs to which key."""
FIELD = """**What the field calls it.** Multi-query associative recall, MQAR (zoology, Arora and
others, [2312.04927](https://arxiv.org/abs/2312.04927)). There a text is read at once, its pairs
stand first, keys and values come from two vocabularies, and each pair is told once. Here it is
read by segments, so that all that is recalled has passed through a state; facts may come late, be
told again, or stand among signs of facts; and keys and values share an alphabet."""
WHY = """**Why**, by the equations: [gates](../block_recurrent.md#why-it-holds-or-forgets),
[slots](../memformer.md#why-it-holds-or-forgets), [the delta
rule](../gated_deltanet.md#why-it-holds-or-forgets)."""
ROW = "Memformer, slots themselves"
COMMANDS = f"""```bash
python -m accelerated.lab.memory --out docs/results
python -m accelerated.lab.memory --rows "{ROW}" --seeds 0 --out runs/memory
python -m accelerated.lab.memory_page docs/results/memory.json
```"""


def page(record: dict) -> str:
    """The page, in Markdown."""
    settings = record["settings"]
    smallest = f"{100 * settings['smallest_difference']:.0f} points between means over the seeds"
    where = f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}."
    parts = [
        wrapped(reading(record)),
        table(record),
        wrapped(WHY),
        wrapped(f"**What was measured.** {ABOUT} {where}"),
        wrapped(f"**What a guess gets.** {GUESSES}"),
        wrapped(f"**How they were trained.** {protocol(settings)} {record['notes']}"),
        wrapped(FIELD),
        wrapped(
            f"**The smallest difference worth knowing**, fixed before the first run, is {smallest}."
        ),
        wrapped(f"**To make it again.** The first command takes {takes(record)}"),
        COMMANDS,
    ]
    return laid_out("memory", TITLE, answer(record), parts)


def takes(record: dict) -> str:
    """How long the commands take, and where they write."""
    whole = len(record["settings"]["stages"])
    hours = {}
    for row, runs in record["runs"].items():
        ended = [stages for stages in runs.values() if len(stages) == whole]
        hours[row] = [sum(sum(each["seconds"]) for each in stages) / 3600 for stages in ended]
    if not all(hours.values()):
        return "many hours."
    medians = {row: statistics.median(values) for row, values in hours.items()}
    return f"""about {SEEDS * sum(medians.values()):.0f} hours of one core, goes on where it was
    interrupted, and writes `memory.json`. The second one makes one row with one seed, in
    {60 * medians[ROW]:.0f} minutes, and writes into `runs/memory`, over no page. The third one
    makes this page and its picture of what a record has."""


def protocol(settings: dict) -> str:
    """How the rows were trained, in words."""
    sizes = {row["state_bytes"] for row in settings["rows"].values()}
    parameters = [row["parameters"] for row in settings["rows"].values()]
    updates = [
        f"{name} ({', '.join(f'{part[1]:,}' for part in parts)} updates)"
        for name, parts in settings["stages"].items()
    ]
    return (
        f"All rows read the same tokens: {settings['batch']} documents an update, in segments of "
        f"{settings['segment']}. The stages are {'; '.join(updates)}, each from the weights of the "
        f"one before. A state is all that a segment passes to the next, {min(sizes):,} to "
        f"{max(sizes):,} bytes. Models have {min(parameters):,} to {max(parameters):,} parameters. "
        f"In training at most {furthest(settings, 'distance')} tokens of filler stand between "
        f"facts and questions, and {furthest(settings, 'begin')} before the facts."
    )


def furthest(settings: dict, name: str) -> int:
    """The largest value that a part of any stage gives to a field of the task."""
    parts = [told for stage in settings["stages"].values() for told, _, _ in stage]
    return max(told.get(name, 0) for told in parts)


def answer(record: dict) -> str:
    """What each row does that ended, in one sentence a row."""
    ended, stages = ended_of(record)
    if not ended:
        return "No run has ended yet."
    doing = {row: [] for row in ended}
    for does, tests in SAYS.items():
        for row in able(ended, stages[-1], *tests):
            doing[row].append(does)
    said = [f"{called(row)} {listed(does)}." for row, does in doing.items() if does]
    if said and not all(doing.values()):
        said.append("No other row does any of it.")
    return " ".join(said) or "No row does any of it."


def reading(record: dict) -> str:
    """What the answer means: its measure and its seeds, and what the stages taught."""
    ended, stages = ended_of(record)
    if not ended:
        return ""
    step = record["settings"]["smallest_difference"]
    skills = [taught(ended, stages, step, skill) for skill in SKILLS]
    said = [SAID_OF, seeds_of(ended, stages[-1]), slow_seeds(ended, stages[-1]), *skills]
    return " ".join(filter(None, said))


def ended_of(record: dict) -> tuple[dict, list[str]]:
    """The rows of which a seed has ended, and the stages."""
    stages = [*record["settings"]["stages"]]
    rows = record["runs"].items()
    return {row: runs for row, runs in rows if after(runs, stages[-1])}, stages


def slow_seeds(ended: dict, last: str) -> str:
    """Which rows had not learned the task even at 32 tokens, and in how many seeds."""
    said = []
    for row, runs in ended.items():
        failed = [values["near"] <= HALF for values in after(runs, last)]
        if any(failed):
            said.append(f"{called(row)} in {sum(failed)} of {len(failed)} seeds")
    return f"Not right in half even at 32 tokens: {listed(said)}." if said else ""


def called(row: str) -> str:
    """A row's name in a sentence: what follows its comma stands in brackets."""
    model, _, kind = row.partition(", ")
    return f"{model} ({kind})" if kind else model


def listed(words: list[str]) -> str:
    """Words as a sentence has them: a, b and c."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def taught(ended: dict, stages: list[str], step: float, skill: str) -> str:
    """Which rows have a skill after the first stage, and which got it from the stage for it."""
    stage, material, tests = SKILLS[skill]
    before = stages[stages.index(stage) - 1]
    already = able(ended, stages[0], *tests)
    said = []
    if already:
        names = listed([called(row) for row in already])
        said.append(f"{names} could {skill} after the first stage already.")
    risen = {}
    for row in able(ended, stage, *tests):
        values = [after(ended[row], each) for each in (before, stage)]
        shares = [mean(each, tests[0]) for each in values]
        anyway = max(0, mean(values[1], "128") - mean(values[0], "128"))  # without that skill
        if row not in already and shares[1] - shares[0] - anyway > step:
            risen[called(row)] = f"from {100 * shares[0]:.0f} to {100 * shares[1]:.0f}%"
    if risen:
        said.append(
            f"{material} taught {listed([*risen])} to {skill}, {listed([*risen.values()])}."
        )
    return " ".join(said)


def able(ended: dict, stage: str, *tests: str) -> list[str]:
    """The rows that give more than half of the answers of each test after a stage, and of near."""
    shares = {
        row: [mean(after(runs, stage), test) for test in ("near", *tests)]
        for row, runs in ended.items()
    }
    return [row for row, found in shares.items() if min(found) > HALF]


def seeds_of(ended: dict, last: str) -> str:
    """How many seeds the means have, and how many a whole experiment has."""
    least = min(len(after(runs, last)) for runs in ended.values())
    if least == SEEDS:
        return f"Each row has {SEEDS} seeds."
    return f"So far each row has at least {least} of the {SEEDS} planned seeds."


def after(runs: dict, stage: str) -> list[dict]:
    """The shares of right answers after a stage, of each seed that has them."""
    return [each["right"] for stages in runs.values() for each in stages if each["stage"] == stage]


def mean(values: list[dict], name: str) -> float:
    """The mean of one share."""
    return statistics.mean(each[name] for each in values)


@functools.cache
def shares_of_simplest() -> dict[str, dict[str, float]]:
    """{what it always says: its shares of right answers} of machines that know no key."""
    choices = SIMPLEST.items()
    return {name: ask(functools.partial(one_answer, choose)) for name, choose in choices}


def table(record: dict) -> str:
    """All numbers in percent: the least and the most of the seeds that are there."""
    rows = []
    for name, shares in shares_of_simplest().items():
        cells = [least_to_most([shares[test]]) for test in COLUMNS.values()]
        rows.append([f"*{name}*", "", "", *cells])
    for row, runs in record["runs"].items():
        for number, stage in enumerate(record["settings"]["stages"], start=1):
            values = after(runs, stage)
            if values:
                shares = [[each[test] for each in values] for test in COLUMNS.values()]
                cells = [least_to_most(own) for own in shares]
                rows.append([row, str(number), str(len(values)), *cells])
    return markdown_table(["right answers, %", "stage", "seeds", *COLUMNS], *rows)


def least_to_most(shares: list[float]) -> str:
    """What the seeds have, in percent: least..most, or one number if they agree."""
    least, most = (f"{100 * each:.0f}" for each in (min(shares), max(shares)))
    return least if least == most else f"{least}..{most}"


def draw(record: dict, path: Path) -> None:
    """Draw hold against overwrite, from stage to stage, and recall by distance."""
    figure, (paths, lines) = new_figure(2)
    rows = {row: runs for row, runs in record["runs"].items() if any(runs.values())}
    colours = dict(zip(rows, COLOURS, strict=False))
    ends = {row: draw_path(paths, record, runs, colours[row]) for row, runs in rows.items()}
    paths.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    for name, shares in shares_of_simplest().items():
        ends[name] = (shares[OVERWRITE], shares["hold"])
        colours[name] = "0.4"
        paths.plot(*ends[name], "x", color=colours[name])
    label_ends(paths, ends, colours)
    paths.set_xlabel("overwrite: the new value of a fact that was told again")
    paths.set_ylabel("hold: the value after 8,192 tokens")
    title = "Stages 1 to 4; size: right among distractors; dots: seeds; x: knows no key"
    paths.set_title(title, fontsize=9, loc="left")
    draw_distances(lines, record, rows, colours)
    save_figure(figure, path)


def draw_path(axes: Any, record: dict, runs: dict, colour: str) -> tuple[float, float]:
    """Draw a row's mean after each stage, joined, and its seeds as dots; return the last mean."""
    found = [values for stage in record["settings"]["stages"] if (values := after(runs, stage))]
    xs, ys, noise = (
        [mean(values, name) for values in found] for name in (OVERWRITE, "hold", "distractors")
    )
    every = [each for values in found for each in values]
    dots = [[each[name] for each in every] for name in (OVERWRITE, "hold")]
    axes.scatter(*dots, s=4, color=colour, alpha=0.5, linewidths=0)
    axes.plot(xs, ys, color=colour, linewidth=1)
    axes.scatter(xs, ys, s=[30 + 170 * share for share in noise], color=colour, alpha=0.35)
    for number, place in enumerate(zip(xs, ys, strict=True), start=1):
        axes.annotate(str(number), place, fontsize=7, ha="center", va="center")
    return xs[-1], ys[-1]


def draw_distances(axes: Any, record: dict, rows: dict, colours: dict[str, str]) -> None:
    """Draw recall by distance after the first stage; those that recall most have names."""
    first = next(iter(record["settings"]["stages"]))
    found = {row: after(runs, first) for row, runs in rows.items()}
    lines = {row: [mean(values, name) for name in DISTANCES] for row, values in found.items()}
    best = sorted(lines, key=lambda row: -sum(lines[row]))[:NAMED]
    places = [*DISTANCES.values()]
    ends = {}
    for row, shares in lines.items():
        colour = colours[row] if row in best else "0.75"
        axes.plot(places, shares, "o-", markersize=3, color=colour)
        ends[row] = (places[-1], shares[-1])
    axes.set(ylim=(-0.03, 1.03), xlabel="tokens from facts to questions", ylabel="right answers")
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{each:,}" for each in places])
    label_ends(axes, {row: ends[row] for row in best}, colours)
    axes.set_title(f"Recall by distance after {first}; grey: other rows", fontsize=9, loc="left")


def main(path: Path) -> None:
    """Write the page and the picture of the record at path."""
    write_page(path, read_record(path, {"settings", "notes", "runs"}), page, draw)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
