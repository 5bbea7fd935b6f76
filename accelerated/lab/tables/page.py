"""The page of a measured table: numbers, orderings judged by their intervals, cost, and options.

Runs of one seed read the same text in the same order, so an ordering is judged by the differences
of the same seeds.
"""

import itertools
import math
import shlex
import statistics
import textwrap

from accelerated.lab.speed.timing import markdown_table, paired_ratios, spread
from accelerated.lab.tables.notes import NOTES, WIDTH, values_of, wrapped
from accelerated.lab.tables.table import Table
from accelerated.lab.trials import HEADLINE_SEEDS, SEEDS, join, settled, words_of
from accelerated.models import NAMES

# {values - 1: standard errors within which the mean is, 95 times in 100}
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def mean_and_spread(values: list[float | None], form: str) -> str:
    """'mean (least .. most)' of the seeds, or their only value; or how many diverged."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return f"{len(values) - len(finite)} of {len(values)} diverged"
    least = min(finite)
    most = max(finite)
    mean = f"{statistics.mean(finite):{form}}"
    if least == most:
        return mean
    return f"{mean} ({f'{least:{form}}'.rstrip('%')} .. {f'{most:{form}}'.rstrip('%')})"


def laid_out(record: dict, title: str, program: str, about: str, how: str, *parts: str) -> str:
    """A page in Markdown: about, the command, when and how it was measured, and the parts.

    What is empty is left out.
    """
    command = f"```bash\npython -m accelerated.lab.{program}\n```"
    measured = f"Measured on {record['date']}, {record['machine']}, torch {record['torch']}{how}"
    blocks = [f"# {title}", wrapped(about), command, wrapped(measured), *parts]
    return "\n\n".join(filter(None, blocks)) + "\n"


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown."""
    name = record["name"]
    seeds = ", ".join(map(str, SEEDS))
    if table.headline:
        seeds += f"; 0 to {HEADLINE_SEEDS[-1]} of {'; '.join(table.headline)}"
    how = f", {record['jobs']} runs at a time. Mean (least .. most) of seeds {seeds}."
    parts = [
        f"![{table.title}]({name}.svg)" if table.picture else "",
        numbers(table, record),
        NOTES[table.notes](record) if table.notes else "",
        verdicts(table, record),
        cost(record),
        settings_part(record),
    ]
    how += f" {onward(name)}"
    return laid_out(record, table.title, f"tables {name}", table.about, how, *parts)


def onward(name: str) -> str:
    """The sentence that links a page to the other pages about its subject."""
    model, _, _ = name.partition("-")
    if model in NAMES:
        results = f"what else was measured in [its results]({model}.md)"
        return f"The method is in its [chapter](../{model}.md), {results}."
    if name.startswith("recall-"):
        return "What it says of the methods is in [what a memory can hold](recall.md)."
    return "The methods are [side by side](../index.md)."


def numbers(table: Table, record: dict) -> str:
    """The measured numbers: a line for each row, or for each measure if these are many.

    Of rows "a: b", a line for each b.
    """
    forms = {each.title: each.form for each in table.measures if each.form != "hidden"}
    cells = {}  # {row: {measure: text}}
    for row in record["rows"]:
        measured = row["measured"]
        texts = {title: mean_and_spread(measured[title], form) for title, form in forms.items()}
        cells[row["name"]] = texts
    if len(cells) <= 3 < len(forms):
        lines = [[title, *(texts[title] for texts in cells.values())] for title in forms]
        return markdown_table(["", *cells], *lines)
    if len({name.partition(": ")[2] for name in cells}) > 1:
        [title] = forms
        return crossed({name: texts[title] for name, texts in cells.items()}, title)

    columns = {"": list(cells)}
    for title in forms:
        columns[title] = [texts[title] for texts in cells.values()]
    shares = share_of_gap(record, table.gap)
    if shares:
        columns["of the gap"] = list(shares.values())
    papers = [row["paper"] for row in record["rows"]]
    if any(papers):
        columns["the paper"] = papers
    text = by_columns(columns)
    if table.gap and not shares:
        floor, ceiling = table.gap
        why = f"{ceiling} is not clearly better than {floor}"
        text += "\n\n" + wrapped(f"{why}, so no share of a gap can be given.")
    return text


def by_columns(columns: dict[str, list[str]]) -> str:
    """A table of {head: cells}."""
    return markdown_table([*columns], *zip(*columns.values(), strict=True))


def crossed(cells: dict[str, str], title: str) -> str:
    """Tables of cells {"a: b": text}: a column for each a, a line for each b."""
    columns = list(dict.fromkeys(name.partition(": ")[0] for name in cells))
    lines = list(dict.fromkeys(name.partition(": ")[2] for name in cells))
    half = -(-len(columns) // 2)  # so that a table is not too wide
    tables = []
    for some in (columns[:half], columns[half:]):
        body = [[b, *(cells.get(f"{a}: {b}", "") for a in some)] for b in lines]
        if some:
            tables.append(markdown_table([title, *some], *body))
    return "\n\n".join(tables)


def share_of_gap(record: dict, gap: list[str]) -> dict[str, str]:
    """{row: the part of the way from floor to ceiling that it goes}, if that way is told.

    It is taken over the seeds that all three have.
    """
    if not gap:
        return {}
    floor, ceiling = gap
    whole = differences(record, f"{ceiling} < {floor}")
    if verdict(whole) != "holds":
        return {}
    shares = {}
    for row in record["rows"]:
        part = differences(record, f"{row['name']} < {floor}")
        shares[row["name"]] = f"{sum(part[: len(whole)]) / sum(whole[: len(part)]):.0%}"
    return shares


def verdicts(table: Table, record: dict) -> str:
    """Each ordering, of the paper or expected: the mean difference, its interval, the verdict."""
    if not table.orderings:
        return ""
    lines = [verdict_line(table, record, ordering) for ordering in table.orderings]
    whose = "The paper's" if record["name"].partition("-")[0] in NAMES else "Expected"
    text = f"""What is left of < is expected to be lower. Differences are right minus left, so a
    positive one agrees. An ordering holds, or does not, if all of the 95% interval of the mean
    difference (Student's t, the same seeds) is on one side of zero; otherwise these seeds cannot
    tell. The numbers of each seed are in the [record]({record["name"]}.json)."""
    if any(line[-1] == "does not hold" for line in lines):
        text += " What was tried for those that do not hold is in the [log](log.md)."
    head = [f"{whose.lower()} ordering", "mean difference, 95% interval", "here"]
    return f"## {whose} orderings\n\n{wrapped(text)}\n\n{markdown_table(head, *lines)}"


def verdict_line(table: Table, record: dict, ordering: str) -> list[str]:
    """An ordering, its mean difference with the interval, and what the seeds say of it."""
    forms = [each.form for each in table.measures if ordering.endswith(each.title)]
    form = forms[0] if forms else table.measures[0].form
    by_seed = differences(record, ordering)
    mean, half = mean_and_interval(by_seed)
    difference = f"{mean:+{form}}"
    if math.isfinite(half):
        difference += f" ± {half:{form}}"

    better, worse = ordering.split(" < ")
    row, _, title = better.partition(" @ ")
    if title and worse.endswith(f" @ {title}"):  # it is said once
        ordering = f"{row} < {worse}"
    return [ordering, difference, verdict(by_seed)]


def differences(record: dict, ordering: str) -> list[float]:
    """worse - better of an ordering "better < worse" for each seed that both have.

    A run that diverged is infinitely bad.
    """
    better, worse = (values_of(record, side) for side in ordering.split(" < "))
    better = [math.inf if value is None else value for value in better]
    worse = [math.inf if value is None else value for value in worse]
    return [b - a for a, b in zip(better, worse, strict=False)]


def mean_and_interval(differences: list[float]) -> tuple[float, float]:
    """The mean of differences, and half the width of its 95% interval.

    That is infinite of one value, and NaN if a run diverged.
    """
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, math.inf
    if not all(map(math.isfinite, differences)):
        return mean, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, STUDENT[len(differences) - 1] * error


def verdict(differences: list[float]) -> str:
    """What worse - better of each seed says of an ordering."""
    mean, half = mean_and_interval(differences)
    if mean - half > 0 or min(differences) == math.inf:
        return "holds"
    if mean + half < 0 or max(differences) == -math.inf:
        return "does not hold"
    return "cannot be told"


def names_and_rows(record: dict) -> list[tuple[str, dict]]:
    """(name, row) of a record's rows, one for those after one another that are the same model.

    Their name is "a: 1 .. 3".
    """
    pairs = []
    for _, same in itertools.groupby(record["rows"], key=lambda row: row["options"]):
        first, *others = same
        name = first["name"]
        if others:
            name += f" .. {others[-1]['name'].rpartition(': ')[2]}"
        pairs.append((name, first))
    return pairs


def cost(record: dict) -> str:
    """Parameters, speed and the tuned choice of each row."""
    rows = names_and_rows(record)
    columns = {
        "": [name for name, _ in rows],
        "parameters": [f"{row['parameters']:,}" for _, row in rows],
    }
    text = "No row was tuned: the learning rates are in the settings below."
    if len(record["grid"]) > 1:
        text = how_tuned(record, rows)
        columns["tuned"] = [f"`{row['choice']}`" for _, row in rows]
    if "step_seconds" in rows[0][1]:
        text += """ Speeds are medians of forward and backward passes of a training step that took
        turns; times are over the first row's, median (least..most)."""
        columns |= speed_columns(record, [row for _, row in rows])
    return f"## Cost\n\n{wrapped(text)}\n\n{by_columns(columns)}"


def how_tuned(record: dict, rows: list[tuple[str, dict]]) -> str:
    """By what every row was tuned, over which choices, and which rows are best at an end."""
    grid = record["grid"]
    tuned_by = record.get("tuned_by", "its last validation")  # older records do not say it
    choices = ", ".join(f"`{choice}`" for choice in grid)
    text = f"Every row was tuned on seed 0 by {tuned_by}, each over {choices}."
    ends = [name for name, row in rows if row["choice"] in (grid[0], grid[-1])]
    of_rates = all(len(settled(choice)) == 1 for choice in grid)
    if ends and len(grid) > 2 and of_rates:
        text += f" Best at an end of the grid: {'; '.join(ends)}."
    return text


def speed_columns(record: dict, rows: list[dict]) -> dict[str, list[str]]:
    """{title: cells} of what the rows' steps took; of a whole training too if passes differ."""
    seconds = [row["step_seconds"] for row in rows]  # for 1,000 tokens
    rates = [1000 / statistics.median(of_row) for of_row in seconds]
    ratios = [paired_ratios(of_row, seconds[0]) for of_row in seconds]
    columns = {
        "tokens/s in training": [f"{rate:,.0f}" for rate in rates],
        "time for a token": [spread(of_row, ".2f") for of_row in ratios],
    }
    options = [settled(join(record["options"], row["options"])) for row in rows]
    passes = [float(of_row["--epochs"][0]) for of_row in options if "--epochs" in of_row]
    if len(passes) == len(rows) and len(set(passes)) > 1:
        times = [n / passes[0] * statistics.median(r) for n, r in zip(passes, ratios, strict=True)]
        columns["of a training"] = [f"{time:.2f}" for time in times]
    return columns


def settings_part(record: dict) -> str:
    """The options, to make every row again."""
    all_rows = record["options"]
    if len(record["grid"]) == 1:  # the choice of rows that were not tuned
        all_rows = join(all_rows, record["grid"][0])
    options = {"all": all_rows}
    first = ""
    if record["first"]:
        options["FIRST"] = record["first"]
        first = "; FIRST is the run that all begin from"
    for name, row in names_and_rows(record):
        options[name] = row["options"]
    lines = []
    for name, of_row in options.items():
        line = f"{name:<24} {shlex.join(words_of(of_row))}"
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False))
    about = f"Options of `train.py`: those of all rows, then each row's own{first}."
    text = "\n".join(lines)
    return f"## Settings\n\n{about}\n\n```text\n{text}\n```"
