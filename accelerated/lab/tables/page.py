"""The page of a measured table: its numbers, the orderings judged by their intervals, what it cost, and every row's options.

Runs of one seed read the same text in the same order, so an ordering is judged by the differences of the same seeds.
"""

import itertools
import math
import shlex
import statistics
import textwrap

from accelerated.lab.speed.timing import markdown_table, paired_ratios, spread
from accelerated.lab.tables.notes import NOTES, WIDTH, mean_of, values_of, wrapped
from accelerated.lab.tables.table import Table
from accelerated.lab.trials import HEADLINE_SEEDS, SEEDS, join, settled, words_of
from accelerated.models import NAMES

STUDENT = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
}  # {values - 1: standard errors within which the mean is, 95 times in 100}


def mean_and_spread(values: list[float | None], form: str) -> str:
    """'mean (least .. most)' of the seeds, or their only value; or how many diverged."""
    if diverged := values.count(None):
        return f"{diverged} of {len(values)} diverged"
    least, mean, most = (f"{value:{form}}" for value in (min(values), mean_of(values), max(values)))
    return (
        mean
        if min(values) == max(values)
        else f"{mean} ({least.rstrip('%')} .. {most.rstrip('%')})"
    )


def laid_out(record: dict, title: str, program: str, about: str, how: str, *parts: str) -> str:
    """A page in Markdown: about before the command, then when and how it was measured, and the parts that are not empty."""
    command = f"```bash\npython -m accelerated.lab.{program}\n```"
    measured = f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}{how}"
    return (
        "\n\n".join(
            filter(None, [f"# {title}", wrapped(about), command, wrapped(measured), *parts])
        )
        + "\n"
    )


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown."""
    name, seeds = record["name"], ", ".join(map(str, SEEDS))
    seeds += f"; 0 to {HEADLINE_SEEDS[-1]} of {'; '.join(table.headline)}" if table.headline else ""
    how = (
        f", {record['jobs']} runs at a time. Mean (least .. most) of seeds {seeds}. {onward(name)}"
    )
    parts = [f"![{table.title}]({name}.svg)" if table.picture else "", numbers(table, record)]
    if table.gap and not share_of_gap(record, table.gap):
        told = f"{table.gap[1]} is not clearly better than {table.gap[0]}, so no share of a gap can be given."
        parts.append(wrapped(told))
    parts += [
        NOTES[table.notes](record) if table.notes else "",
        verdicts(table, record),
        cost(record),
        settings_part(record),
    ]
    return laid_out(record, table.title, f"tables {name}", table.about, how, *parts)


def onward(name: str) -> str:
    """The sentence that links a page to the other pages about its subject."""
    if (model := name.partition("-")[0]) in NAMES:
        return f"The method is in its [chapter](../{model}.md), what else was measured in [its results]({model}.md)."
    if name.startswith("recall-"):
        return "What it says of the methods is in [what a memory can hold](recall.md)."
    return "The methods are [side by side](../index.md)."


def numbers(table: Table, record: dict) -> str:
    """The measured numbers: a line for each row, or for each measure if these are many; or of rows "a: b" for each b."""
    forms = {m.title: m.form for m in table.measures if m.form != "hidden"}
    measured = {row["name"]: row["measured"] for row in record["rows"]}
    cells = {
        name: {title: mean_and_spread(of_row[title], forms[title]) for title in forms}
        for name, of_row in measured.items()
    }
    if len(cells) <= 3 < len(forms):
        return markdown_table(
            ["", *cells], *([title, *(row[title] for row in cells.values())] for title in forms)
        )
    columns, lines = (
        [*dict.fromkeys(name.partition(": ")[part] for name in cells)] for part in (0, 2)
    )
    if len(lines) > 1:
        [title], half = (
            forms,
            -(-len(columns) // 2),
        )  # of the columns, so that they are not too wide
        tables = []
        for names in filter(None, (columns[:half], columns[half:])):
            body = (
                [b, *(cells.get(f"{a}: {b}", {title: ""})[title] for a in names)] for b in lines
            )
            tables.append(markdown_table([title, *names], *body))
        return "\n\n".join(tables)
    for name, share in (closed := share_of_gap(record, table.gap)).items():
        cells[name]["of the gap"] = share
    paper = ["the paper"] if any(row["paper"] for row in record["rows"]) else []
    body = (
        [row["name"], *cells[row["name"]].values(), *([row["paper"]] if paper else [])]
        for row in record["rows"]
    )
    return markdown_table(["", *forms, *(["of the gap"] if closed else []), *paper], *body)


def share_of_gap(record: dict, gap: list[str]) -> dict[str, str]:
    """{row: the part of the way from floor to ceiling that it goes, over the seeds that all three have}, if that way is told."""
    if not gap or verdict(whole := differences(record, f"{gap[1]} < {gap[0]}")) != "holds":
        return {}
    parts = {
        row["name"]: differences(record, f"{row['name']} < {gap[0]}") for row in record["rows"]
    }
    return {
        name: f"{sum(part[: len(whole)]) / sum(whole[: len(part)]):.0%}"
        for name, part in parts.items()
    }


def verdicts(table: Table, record: dict) -> str:
    """Each ordering, of the paper or expected: the mean difference with its interval, and what it says."""
    if not table.orderings:
        return ""
    forms, lines = {m.title: m.form for m in table.measures}, []
    for ordering in table.orderings:
        by_seed = differences(record, ordering)
        form = next(
            (form for title, form in forms.items() if ordering.endswith(title)),
            table.measures[0].form,
        )
        better, worse = ordering.split(" < ")
        row, _, title = better.partition(" @ ")
        claim = f"{row} < {worse}" if title and worse.endswith(f" @ {title}") else ordering
        mean, half = mean_and_interval(by_seed)
        lines.append(
            [
                claim,
                f"{mean:+{form}}" + (f" ± {half:{form}}" if math.isfinite(half) else ""),
                verdict(by_seed),
            ]
        )
    whose = "The paper's" if record["name"].partition("-")[0] in NAMES else "Expected"
    text = f"""What is left of < is expected to be lower. Differences are right minus left, so a positive one agrees. An ordering
    holds, or does not, if all of the 95% interval of the mean difference (Student's t, the same seeds) is on one side of zero;
    otherwise these seeds cannot tell. The numbers of each seed are in the [record]({record["name"]}.json)."""
    if any(line[-1] == "does not hold" for line in lines):
        text += " What was tried for those that do not hold is in the [log](log.md)."
    head = [f"{whose.lower()} ordering", "mean difference, 95% interval", "here"]
    return f"## {whose} orderings\n\n{wrapped(text)}\n\n{markdown_table(head, *lines)}"


def differences(record: dict, ordering: str) -> list[float]:
    """worse - better of an ordering "better < worse" for each seed; a run that diverged is infinitely bad."""
    sides = (
        [math.inf if value is None else value for value in values_of(record, side)]
        for side in ordering.split(" < ")
    )
    return [
        worse - better for better, worse in zip(*sides, strict=False)
    ]  # of the seeds that both have


def mean_and_interval(differences: list[float]) -> tuple[float, float]:
    """The mean of differences, and half the width of its 95% interval, infinite of one value and NaN if a run diverged."""
    if len(differences) == 1 or not all(map(math.isfinite, differences)):
        return statistics.fmean(differences), math.inf if len(differences) == 1 else math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), STUDENT[len(differences) - 1] * error


def verdict(differences: list[float]) -> str:
    """What worse - better of each seed says of an ordering."""
    mean, half = mean_and_interval(differences)
    if mean - half > 0 or min(differences) == math.inf:
        return "holds"
    return "does not hold" if mean + half < 0 or max(differences) == -math.inf else "cannot be told"


def names_and_rows(record: dict) -> list[tuple[str, dict]]:
    """(name, row) of a record's rows, one for those after one another that are the same model: "a: 1 .. 3"."""
    pairs = []
    for _, same in itertools.groupby(record["rows"], key=lambda row: row["options"]):
        first, *others = same
        last = f" .. {others[-1]['name'].rpartition(': ')[2]}" if others else ""
        pairs.append((first["name"] + last, first))
    return pairs


def cost(record: dict) -> str:
    """Parameters, speed and the tuned choice of each row."""
    rows, grid = names_and_rows(record), record["grid"]
    columns = {
        "": [name for name, _ in rows],
        "parameters": [f"{row['parameters']:,}" for _, row in rows],
    }
    text = "No row was tuned: the learning rates are in the settings below."
    if len(grid) > 1:
        tuned_by = record.get("tuned_by", "its last validation")  # older records do not say it
        text = f"Every row was tuned on seed 0 by {tuned_by}, each over {', '.join(f'`{choice}`' for choice in grid)}."
        ends = [name for name, row in rows if row["choice"] in (grid[0], grid[-1])]
        if (
            ends and len(grid) > 2 and all(len(settled(choice)) == 1 for choice in grid)
        ):  # a grid of rates alone
            text += f" Best at an end of the grid: {'; '.join(ends)}."
        columns["tuned"] = [f"`{row['choice']}`" for _, row in rows]
    if "step_seconds" in rows[0][1]:
        text += """ Speeds are medians of forward and backward passes of a training step that took turns; times are over the first
        row's, median (least..most)."""
        seconds = [row["step_seconds"] for _, row in rows]  # for 1,000 tokens
        columns["tokens/s in training"] = [
            f"{1000 / statistics.median(of_row):,.0f}" for of_row in seconds
        ]
        ratios = [paired_ratios(of_row, seconds[0]) for of_row in seconds]
        columns["time for a token"] = [spread(of_row, ".2f") for of_row in ratios]
        passes = [
            settled(join(record["options"], row["options"])).get("--epochs") for _, row in rows
        ]
        if None not in passes and len(set(map(tuple, passes))) > 1:
            times = [
                float(n) / float(passes[0][0]) * statistics.median(r)
                for [n], r in zip(passes, ratios, strict=True)
            ]
            columns["of a training"] = [f"{time:.2f}" for time in times]
    return f"## Cost\n\n{wrapped(text)}\n\n{markdown_table([*columns], *zip(*columns.values(), strict=True))}"


def settings_part(record: dict) -> str:
    """The options, to make every row again."""
    only = (
        record["grid"] if len(record["grid"]) == 1 else []
    )  # the choice of rows that were not tuned
    options = {
        "all": join(record["options"], *only),
        **({"FIRST": record["first"]} if record["first"] else {}),
    }
    options |= {name: row["options"] for name, row in names_and_rows(record)}
    lines = (f"{name:<24} {shlex.join(words_of(of_row))}" for name, of_row in options.items())
    text = "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)
        for line in lines
    )
    first = "; FIRST is the run that all begin from" if record["first"] else ""
    return f"## Settings\n\nOptions of `train.py`: those of all rows, then each row's own{first}.\n\n```text\n{text}\n```"
