"""The page of a measured table: one question, its answer, and what the answer rests on."""

import itertools
import statistics

from accelerated.lab.harness import RESULTS, mean_and_interval, plus_minus, read_record
from accelerated.lab.pages import commands, laid_out, markdown_table, mean_and_spread, wrapped
from accelerated.lab.speed.timing import paired_ratios, spread
from accelerated.lab.tables.orderings import differences, in_words, over_documents
from accelerated.lab.tables.table import TABLES, Table
from accelerated.lab.trials import join, settled

READ = """Numbers are means over the seeds (least..most); compare rows of as many. "Cleared": the
memory is emptied at each segment. Times are training's, as parts of the first line's."""


def page(table: Table, record: dict) -> str:
    """The page of a record, in Markdown, with the records of other tables that it shows."""
    parts = numbers_and_protocol(table, record)
    for other, its in TABLES.items():
        path = RESULTS / f"{other}.json"
        if its.page == record["name"] and path.exists():
            picture = f"![{its.title}]({other}.svg)"
            parts += [f"## {its.title}", picture, wrapped(f"**{its.answer}**")]
            parts += numbers_and_protocol(its, read_record(path, {"rows"}))
    return laid_out(record["name"], table.title, table.answer, parts)


def numbers_and_protocol(table: Table, record: dict) -> list[str]:
    """A record's numbers, what they were measured by, and what they can tell."""
    name = record["name"]
    return [
        numbers(table, record),
        comparisons(table, record),
        wrapped(f"**What was measured.** {table.about}"),
        wrapped(measured_how(record)),
        wrapped(smallest_difference(table, record)),
        wrapped(f"**What would change this answer.** {table.change}") if table.change else "",
        commands(f"tables {name}", name, table.takes, next(iter(table.rows))),
    ]


def measured_how(record: dict) -> str:
    """How to read the numbers, how rows were tuned, and where it was measured."""
    return f"""{READ} {how_tuned(record)} The [record]({record["name"]}.json) has every seed's
    numbers and all options. Measured on {record["date"]}: {record["machine"]}, torch
    {record["torch"]}, Python {record["python"]}."""


def how_tuned(record: dict) -> str:
    """By what every row was tuned, over which choices, and which rows are best at an end."""
    grid = record["grid"]
    if len(grid) < 2:
        return ""
    option = grid[0].partition(" ")[0]
    values = ", ".join(grid).replace(f"{option} ", "")
    text = f"Each model's `{option}` was chosen on seed 0 by its last validation, from {values}."
    ends = [row["name"] for row in record["rows"] if row["choice"] in (grid[0], grid[-1])]
    return f"{text} Best at an end of these: {'; '.join(ends)}." if ends else text


def numbers(table: Table, record: dict) -> str:
    """The measured numbers, a line for each row."""
    forms = {each.title: each.form for each in table.measures if each.form != "hidden"}
    lines = []  # {title: cell} each
    for row, costs in zip(record["rows"], costs_of(record), strict=True):
        is_control = "--clear-memory" in row["options"]
        titles = ["cleared"] if is_control else [*forms]
        line = {"": row["name"]} | shown(row, titles, forms)
        line["seeds"] = str(len(row["seeds"]))
        if row["paper"]:
            line["the paper"] = row["paper"]
        lines.append(line | costs)
    if table.beside:
        lines.append(line_of_another(table, forms))
    head = list(dict.fromkeys(itertools.chain(*lines)))
    return markdown_table(head, *([line.get(title, "") for title in head] for line in lines))


def shown(row: dict, titles: list[str], forms: dict[str, str]) -> dict[str, str]:
    """{title: mean and spread} of a row's measures."""
    return {title: mean_and_spread(row["measured"][title], forms[title]) for title in titles}


def line_of_another(table: Table, forms: dict[str, str]) -> dict[str, str]:
    """The best row on the same text, of the published record that has it, with a link."""
    name, _, label = table.beside.partition(": ")
    published = read_record(RESULTS / f"{name}.json", {"rows"})
    [row] = [row for row in published["rows"] if row["name"] == label]
    titles = [title for title in forms if title in row["measured"]]
    line = {"": f"[{label}]({name}.md), another model"} | shown(row, titles, forms)
    return line | {"parameters": f"{row['parameters']:,}"}


def costs_of(record: dict) -> list[dict[str, str]]:
    """Each row's parameters, and what its training took over the first's: {title: cell}."""
    rows = record["rows"]
    tokens = [tokens_read(settled(join(record["options"], row["options"]))) for row in rows]
    costs = []
    for row, read in zip(rows, tokens, strict=True):
        ratios = paired_ratios(row["step_seconds"], rows[0]["step_seconds"])
        cost = {"parameters": f"{row['parameters']:,}", "time per token": spread(ratios, ".2f")}
        if len(set(tokens)) > 1:
            cost["time in all"] = f"{read / tokens[0] * statistics.median(ratios):.2f}"
        costs.append(cost)
    return costs


def tokens_read(options: dict[str, list[str]]) -> float:
    """The new tokens that a run trains on, or if it counts in them, its passes through the text."""

    def number(option: str, unless_given: str) -> float:
        return float(options.get(option, [unless_given])[0])

    passes = number("--epochs", "1")
    new_tokens = number("--batch", "1") * (number("--segment", "1") - number("--overlap", "0"))
    return passes or number("--steps", "1") * number("--horizon", "1") * new_tokens


def comparisons(table: Table, record: dict) -> str:
    """How far the first of two rows is ahead, with intervals, if their documents were scored."""
    lines = []
    for ordering in table.orderings:
        if not scores_documents(record, ordering):
            continue
        mean, half = mean_and_interval(differences(record, ordering))
        low, high = over_documents(record, ordering)
        ahead = [plus_minus(mean, half), f"{low:+.3f}..{high:+.3f}"]
        lines.append([in_words(record, ordering), *ahead])
    if not lines:
        return ""
    head = ["bits ahead", "95% over seeds", "over documents"]
    return markdown_table(head, *lines)


def scores_documents(record: dict, ordering: str) -> bool:
    """Whether an ordering is of two rows whose test documents were scored one by one."""
    scored = {row["name"] for row in record["rows"] if "documents" in row["measured"]}
    return scored.issuperset(ordering.split(" < "))


def smallest_difference(table: Table, record: dict) -> str:
    """What half the interval of the first ordering says: the least that is told from chance."""
    first = table.orderings[0]
    _, half = mean_and_interval(differences(record, first))
    text = f"""**The smallest difference that the first comparison could see** is {half:.2g}. It is
    half of its 95% interval (Student's t, paired seeds). Others have their own."""
    if scores_documents(record, first):
        return f"{text} Documents were drawn anew 10,000 times, with replacement."
    return f"{text} The interval does not cover other test documents."
