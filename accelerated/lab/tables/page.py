"""The page of a measured table: one question, its answer, and what the answer rests on.

In this order: a picture, the answer, the numbers, what was measured, the smallest difference that
this design tells from chance, and what would change the answer.
"""

import json
import math
import statistics
from pathlib import Path

from accelerated.lab.speed.timing import markdown_table, paired_ratios, spread
from accelerated.lab.tables.notes import pareto_rows, wrapped
from accelerated.lab.tables.orderings import (
    differences,
    in_words,
    mean_and_interval,
    mean_of,
    over_both,
    over_documents,
    plus_minus,
)
from accelerated.lab.tables.table import Table
from accelerated.lab.trials import SEEDS, join, settled

RESULTS = Path("docs/results")


def mean_and_spread(values: list[float | None], form: str, lost: str = "diverged") -> str:
    """'mean (least..most)' of the seeds, or their only value; or how many are lost."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return f"{len(values) - len(finite)} of {len(values)} {lost}"
    least = min(finite)
    most = max(finite)
    mean = f"{statistics.mean(finite):{form}}"
    if least == most:
        return mean
    return f"{mean} ({f'{least:{form}}'.rstrip('%')}..{f'{most:{form}}'.rstrip('%')})"


def laid_out(
    record: dict,
    title: str,
    name: str,
    program: str,
    answer: str,
    how: str,
    smallest: str,
    change: str,
    *parts: str,
) -> str:
    """A page in Markdown: its picture, the answer, the parts, how it was measured, the command, the
    smallest difference that could be seen, and what would change the answer.

    The picture is beside the page, under its name.
    """
    measured = f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}{how}"
    blocks = [
        f"# {title}",
        f"![{title}]({name}.svg)",
        wrapped(f"**{answer}**"),
        *parts,
        wrapped(measured),
        f"```bash\npython -m accelerated.lab.{program}\n```",
        wrapped(f"**The smallest difference that this design could see** {smallest}"),
        wrapped(f"**What would change this answer.** {change}"),
    ]
    return "\n\n".join(blocks) + "\n"


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown."""
    blocks = [
        f"# {table.title}",
        f"![{table.title}]({record['name']}.svg)",
        wrapped(f"**{table.answer}**") if table.answer else "",
        numbers(table, record),
        table.bold,
        wrapped(f"**What was measured.** {table.about}"),
        measured_how(table, record),
        comparisons(table, record),
        wrapped(smallest_difference(table, record)),
        wrapped(f"**What would change this answer.** {table.change}") if table.change else "",
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def measured_how(table: Table, record: dict) -> str:
    """How to read the numbers, how rows were tuned, when and where it was measured, the command."""
    seeds = "seeds" if table.headline else f"seeds {', '.join(map(str, SEEDS))}"
    parts = [f"Each number is a mean over {seeds}."]
    if not is_crossed(record):
        parts = [f"Numbers are means over {seeds} (least..most)."]
    if 0 < len(table.headline) < len(table.rows):
        parts.append("Compare rows of as many seeds.")
    if any(each.title == "cleared" for each in table.measures):
        parts.append('"Cleared": the memory is emptied at each segment.')
    says_times = len(record["rows"]) > 1 and not is_crossed(record)
    if "step_seconds" in record["rows"][0] and says_times:
        parts.append("Times are training's, as parts of the first line's.")
    parts.append(how_tuned(record))
    if record.get("minutes"):
        parts.append(f"Runs were stopped in time for a page after {record['minutes']:g} minutes.")
    parts.append(f"The [record]({record['name']}.json) has every seed's numbers and all options.")
    where = f"Measured on {record['date']}: {record['machine']}, torch {record['torch']}"
    if "python" in record:
        where += f", Python {record['python']}"
    words = f"python -m accelerated.lab.tables {record['name']}"
    if record.get("minutes"):
        words += f" --minutes {record['minutes']:g} --jobs {record['jobs']}"
    command = f"```bash\n{words}\n```"
    return f"{wrapped(' '.join(parts))}\n\n{wrapped(where + '.')}\n\n{command}"


def how_tuned(record: dict) -> str:
    """By what every row was tuned, over which choices, and which rows are best at an end."""
    grid = record["grid"]
    if len(grid) == 1:
        return ""
    option = grid[0].partition(" ")[0]
    values = ", ".join(choice.removeprefix(f"{option} ") for choice in grid)
    text = f"Each model's `{option}` was chosen on seed 0 by its last validation, from {values}."
    ends = [row["name"] for row in record["rows"] if row["choice"] in (grid[0], grid[-1])]
    if len(ends) == len(record["rows"]):
        text += " Each row is best at an end of these."
    elif ends:
        text += f" Best at an end of these: {'; '.join(ends)}."
    return text


def numbers(table: Table, record: dict) -> str:
    """The measured numbers: a line for each row, or for each measure if these are many.

    Of rows "a: b", a line for each a.
    """
    forms = {each.title: each.form for each in table.measures if each.form != "hidden"}
    if is_crossed(record):
        [title] = forms
        return crossed(table, record, title, forms[title])

    rows = record["rows"]
    lost = "missing" if record.get("minutes") else "diverged"
    columns = {"": [row["name"] for row in rows]}
    for title, form in forms.items():
        columns[title] = []
        for row in rows:
            is_control = "--clear-memory" in row["options"] and title != "cleared"
            text = mean_and_spread(row["measured"][title], form, lost)
            columns[title].append("" if is_control else text)
    if len(rows) <= 3 < len(forms):
        return markdown_table(*([title, *texts] for title, texts in columns.items()))
    if table.headline:
        first = table.measures[0].title
        columns["seeds"] = [str(len(row["measured"][first])) for row in rows]
    if record.get("minutes"):
        columns["updates"] = ["; ".join(row["updates"]) for row in rows]
    papers = [row["paper"] for row in rows]
    if any(papers):
        columns["the paper"] = papers
    columns |= cost_columns(record)
    if table.beside:
        add_row_of_another(columns, table)
    return markdown_table([*columns], *zip(*columns.values(), strict=True))


def is_crossed(record: dict) -> bool:
    """Whether rows are "a: b" with several b, each of which gets a column."""
    return len({row["name"].partition(": ")[2] for row in record["rows"]}) > 1


def crossed(table: Table, record: dict, title: str, form: str) -> str:
    """The means of rows "a: b", a column for each b and a line for each a.

    Those on the Pareto line are bold.
    """
    best = pareto_rows(record) if table.bold else []
    cells = {}  # {row: text}
    for row in record["rows"]:
        text = f"{mean_of(row['measured'][title]):{form}}"
        cells[row["name"]] = f"**{text}**" if row["name"] in best else text
    lines = list(dict.fromkeys(name.partition(": ")[0] for name in cells))
    columns = list(dict.fromkeys(name.partition(": ")[2] for name in cells))
    body = [[a, *(cells.get(f"{a}: {b}", "") for b in columns)] for a in lines]
    for known, shares in record.get("chances", {}).items():
        if len(set(shares.values())) > 1:
            body.append([known, *(f"{shares[b]:{form}}" for b in columns)])
    return markdown_table([title, *columns], *body)


def add_row_of_another(columns: dict[str, list[str]], table: Table) -> None:
    """Add the best row on the same text, from the published record that has it, with a link."""
    name, _, label = table.beside.partition(": ")
    published = json.loads((RESULTS / f"{name}.json").read_text())
    [row] = [row for row in published["rows"] if row["name"] == label]
    cells = {"": f"[{label}]({name}.md), another model"}
    for each in table.measures:
        if each.title in row["measured"] and each.form != "hidden":
            cells[each.title] = mean_and_spread(row["measured"][each.title], each.form)
    cells["parameters"] = f"{row['parameters']:,}"
    for head, column in columns.items():
        column.append(cells.get(head, ""))


def cost_columns(record: dict) -> dict[str, list[str]]:
    """{title: cells} of the rows' parameters, and of what their training took over the first's."""
    rows = record["rows"]
    columns = {"parameters": [f"{row['parameters']:,}" for row in rows]}
    if "step_seconds" not in rows[0]:
        return columns
    seconds = [row["step_seconds"] for row in rows]  # for 1,000 tokens
    ratios = [paired_ratios(of_row, seconds[0]) for of_row in seconds]
    columns["time per token"] = [spread(of_row, ".2f") for of_row in ratios]
    options = [settled(join(record["options"], row["options"])) for row in rows]
    tokens = [tokens_read(of_row) for of_row in options]
    if len(set(tokens)) > 1:
        times = [n / tokens[0] * statistics.median(r) for n, r in zip(tokens, ratios, strict=True)]
        columns["time in all"] = [f"{time:.2f}" for time in times]
    return columns


def tokens_read(options: dict[str, list[str]]) -> float:
    """The new tokens that a run trains on, or if it counts in them, its passes through the text."""

    def number(option: str, unless_given: str) -> float:
        return float(options.get(option, [unless_given])[0])

    passes = number("--epochs", "1")
    new_tokens = number("--segment", "1") - number("--overlap", "0")
    return passes or number("--steps", "1") * number("--horizon", "1") * new_tokens


def comparisons(table: Table, record: dict) -> str:
    """How far the first of two rows is ahead, with intervals, if their documents were scored."""
    scored = documents_scored(record)
    lines = []
    for ordering in table.orderings:
        if not scored.issuperset(ordering.split(" < ")):
            continue
        mean, half = mean_and_interval(differences(record, ordering))
        low, high = over_documents(record, ordering)
        ahead = [plus_minus(mean, half), f"{low:+.3f}..{high:+.3f}"]
        both = f"± {over_both(half, low, high):.3f}"
        lines.append([in_words(record, ordering), *ahead, both])
    if not lines:
        return ""
    head = ["bits ahead", "95% over seeds", "over documents", "over both"]
    return markdown_table(head, *lines)


def documents_scored(record: dict) -> set[str]:
    """The rows whose test documents were scored one by one, in all seeds."""
    missing = [None]
    measured = {row["name"]: row["measured"].get("documents", missing) for row in record["rows"]}
    return {name for name, by_seed in measured.items() if None not in by_seed}


def smallest_difference(table: Table, record: dict) -> str:
    """What half the interval of the first ordering says: the least that is told from chance."""
    if not table.orderings:
        return widest_spread(table, record)
    first = table.orderings[0]
    _, half = mean_and_interval(differences(record, first))
    if not math.isfinite(half):
        return ""
    text = f"""**The smallest difference that the first comparison could see** is {half:.2g}. It is
    half of its 95% interval (Student's t, paired seeds). Others have their own."""
    if documents_scored(record).issuperset(first.split(" < ")):
        return f"{text} Documents were drawn anew 10,000 times, with replacement."
    return f"{text} The interval does not cover other test documents."


def widest_spread(table: Table, record: dict) -> str:
    """What a table without orderings can tell apart: rows that differ by more than their seeds."""
    [measure] = [each for each in table.measures if each.form != "hidden"]
    spans = {}  # {row: (least, most)}
    for row in record["rows"]:
        values = row["measured"][measure.title]
        if None not in values:
            spans[row["name"]] = (min(values), max(values))
    if not spans:
        return ""
    widest = max(spans, key=lambda name: spans[name][1] - spans[name][0])
    least, most = (f"{value:{measure.form}}" for value in spans[widest])
    return f"""**The smallest difference that this design could see** is about a row's spread of
    seeds, the thin lines. The widest: {least} to {most}, {widest.replace(": ", ", ")}."""
