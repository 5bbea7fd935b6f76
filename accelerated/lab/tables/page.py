"""The page of a measured table: one question, its answer, and what the answer rests on.

It says what its record has: of a part of the table that it is a part, and no answer.
"""

import math
import statistics

from accelerated.lab.harness import (
    RESULTS,
    mean_and_interval,
    mean_of,
    part_in_words,
    plus_minus,
    read_record,
    seeds_in_words,
)
from accelerated.lab.pages import commands, laid_out, markdown_table, mean_and_spread, wrapped
from accelerated.lab.speed.timing import paired_ratios, spread
from accelerated.lab.tables.orderings import (
    by_seed,
    differences,
    in_words,
    orderings_in,
    over_both,
    over_documents,
    seeds_of,
)
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import join, settled


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown, with the records of other tables that it shows."""
    name = record["name"]
    part = part_of(table, record)
    parts = numbers_and_protocol(table, record)
    for other, (its, found) in shown_beside(name).items():
        if not part:
            picture = f"![{its.title}]({other}.svg)"
            bold = wrapped(f"**{its.answer}**")
            parts += [f"## {its.title}", picture, bold, *numbers_and_protocol(its, found)]
    return laid_out(name, table.title, part or table.answer, parts)


def shown_beside(name: str) -> dict[str, tuple[Table, dict]]:
    """{table: (the table, its published record)} of those that the page of `name` shows too."""
    found = {}
    for other, table in TABLES.items():
        path = RESULTS / f"{other}.json"
        if table.page == name and path.exists():
            found[other] = (table, read_record(path, {"rows"}))
    return found


def numbers_and_protocol(table: Table, record: dict) -> list[str]:
    """A record's numbers, what they were measured by, and what they can tell."""
    found = [numbers(table, record), table.bold, comparisons(table, record)]
    how = [wrapped(measured_how(table, record)), wrapped(smallest_difference(table, record))]
    if part_of(table, record):
        return [*found, *how]
    about = wrapped(f"**What was measured.** {table.about}")
    change = wrapped(f"**What would change this answer.** {table.change}") if table.change else ""
    name = record["name"]
    again = commands(f"tables {name}", name, table.takes, next(iter(table.rows)))
    return [*found, about, *how, change, again]


def seeds_by_row(record: dict) -> dict[str, list[int]]:
    """{row: its seeds} of a record."""
    return {row["name"]: seeds_of(row) for row in record["rows"]}


def part_of(table: Table, record: dict) -> str:
    """What part of a table a record has, "" if it has all."""
    return part_in_words(seeds_by_row(record), table.seeds)


def measured_how(table: Table, record: dict) -> str:
    """How to read the numbers, how rows were tuned, and where it was measured."""
    own = seeds_by_row(record)
    seeds = seeds_in_words(own, ", ")
    if table.headline and not part_of(table, record):
        seeds = "seeds"
    mean = f"of {seeds}" if seeds.startswith("seed ") else f"means over {seeds} (least..most)"
    parts = [f"Numbers are {mean}."]
    if is_crossed(record):
        mean = f"of {seeds}" if seeds.startswith("seed ") else f"a mean over {seeds}"
        parts = [f"Each number is {mean}."]
    if len({*map(tuple, own.values())}) > 1:
        parts.append("Compare rows of as many seeds.")
    if any(each.title == "cleared" for each in table.measures):
        parts.append('"Cleared": the memory is emptied at each segment.')
    says_times = len(record["rows"]) > 1 and not is_crossed(record)
    if "step_seconds" in record["rows"][0] and says_times:
        parts.append("Times are training's, as parts of the first line's.")
    parts.append(how_tuned(record))
    parts.append(f"The [record]({record['name']}.json) has every seed's numbers and all options.")
    where = f"Measured on {record['date']}: {record['machine']}, torch {record['torch']}"
    return " ".join([*parts, f"{where}, Python {record['python']}."])


def how_tuned(record: dict) -> str:
    """By what every row was tuned, over which choices, and which rows are best at an end."""
    grid = record["grid"]
    if len(grid) < 2:
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


def pareto_rows(record: dict) -> list[str]:
    """The names of the rows that no other beats for as many FLOPs or fewer."""
    points = []
    for row in record["rows"]:
        flops = mean_of(row["measured"]["FLOPs per token"])
        points.append((flops, mean_of(row["measured"]["test, bits per byte"]), row["name"]))
    best = math.inf
    names = []
    for _, bits, name in sorted(points, key=lambda point: point[:2]):
        if bits < best:
            best = bits
            names.append(name)
    return names


def numbers(table: Table, record: dict) -> str:
    """The measured numbers: a line for each row; of rows "a: b", a line for each a."""
    forms = {each.title: each.form for each in table.measures if each.form != "hidden"}
    if is_crossed(record):
        [title] = forms
        return crossed(table, record, title, forms[title])

    rows = record["rows"]
    columns = {"": [row["name"] for row in rows]}
    for title, form in forms.items():
        columns[title] = []
        for row in rows:
            is_control = "--clear-memory" in row["options"] and title != "cleared"
            text = mean_and_spread(row["measured"][title], form)
            columns[title].append("" if is_control else text)
    if table.headline:
        first = table.measures[0].title
        columns["seeds"] = [str(len(row["measured"][first])) for row in rows]
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
    return markdown_table([title, *columns], *body)


def add_row_of_another(columns: dict[str, list[str]], table: Table) -> None:
    """Add the best row on the same text, from the published record that has it, with a link."""
    name, _, label = table.beside.partition(": ")
    published = read_record(RESULTS / f"{name}.json", {"rows"})
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
    for ordering in orderings_in(record, table.orderings):
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
    scored = [row for row in record["rows"] if "documents" in row["measured"]]
    return {row["name"] for row in scored if None not in by_seed(row, "documents").values()}


def smallest_difference(table: Table, record: dict) -> str:
    """What half the interval of the first ordering says: the least that is told from chance."""
    if not table.orderings:
        return widest_spread(table, record)
    orderings = orderings_in(record, table.orderings)
    half = mean_and_interval(differences(record, orderings[0]))[1] if orderings else math.inf
    if not math.isfinite(half):
        return ""
    text = f"""**The smallest difference that the first comparison could see** is {half:.2g}. It is
    half of its 95% interval (Student's t, paired seeds). Others have their own."""
    if documents_scored(record).issuperset(orderings[0].split(" < ")):
        return f"{text} Documents were drawn anew 10,000 times, with replacement."
    return f"{text} The interval does not cover other test documents."


def widest_spread(table: Table, record: dict) -> str:
    """What a table without orderings can tell apart: rows that differ by more than their seeds."""
    [measure] = [each for each in table.measures if each.form != "hidden"]
    spans = {}  # {row: (least, most)}
    for row in record["rows"]:
        values = row["measured"][measure.title]
        if None not in values and len(values) > 1:
            spans[row["name"]] = (min(values), max(values))
    if not spans:
        return ""
    widest = max(spans, key=lambda name: spans[name][1] - spans[name][0])
    least, most = (f"{value:{measure.form}}" for value in spans[widest])
    return f"""**The smallest difference that this design could see** is about a row's spread of
    seeds, the thin lines. The widest: {least} to {most}, {widest.replace(": ", ", ")}."""
