"""The methods side by side: what their memories can hold, by tasks of `--data recall`, and what they are worth on text."""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.data.recall import RecallConfig
from accelerated.lab.markdown import markdown_table
from accelerated.lab.tables.page import mean_and_spread, mean_of, stem, wrapped
from accelerated.lab.tables.table import CARRIED, CLEARED, GPU, RATES, SMALL, Measure, Ordering, Row, Scale, Table
from accelerated.lab.trials import join
from accelerated.program.errors import option_name
from accelerated.training.log import figure_class, new_figure, plain_axes, save_figure

SEGMENT = 16  # tokens of a method's segment, and of a block of Block-Recurrent
BLOCKS = 4  # times as long are the segments of Block-Recurrent and Memorizing


class Method(NamedTuple):
    """A model and the size of its state; the second size is four times the first."""

    options: str
    size: str = ""  # the option that sets how much the state holds
    sizes: tuple[int, int] = (0, 0)
    whole_documents: bool = True  # in an update, with gradient from segment to segment; otherwise one segment of more lanes

    @property
    def segment(self) -> int:
        """Tokens in a segment."""
        return SEGMENT * BLOCKS if "block_recurrent" in self.options or "memorizing" in self.options else SEGMENT

    def with_state(self, size: int = 0) -> str:
        """The options of the model with its usual state, or with the large one."""
        return join(self.options, f"{self.size} {self.sizes[size]}" if self.size else "")


XL = "--model compressive --head-width {E} --layers 2"
BLOCK = "--model block_recurrent --head-width {E} --layers 2 --window 16"
MEMORIZING = "--model memorizing --head-width {E} --layers 2 --memory-layer 2 --retrieved 8"
MEMFORMER = "--model memformer --head-width {E} --encoder-layers 1 --decoder-layers 1 --max-distance 16 --retention 4"
GPT2 = "--model pretrained_recurrence --layers 3 --max-positions 16"
METHODS = {
    "compressive": Method(f"{XL} --memory 16", "--compressed-memory", (96, 384), False),
    "Transformer-XL": Method(f"{XL} --compressed-memory 0", "--memory", (112, 448), False),
    "block-recurrent": Method(f"{BLOCK} --recurrent-layers 2", "--states", (16, 64)),
    "Slide": Method(f"{BLOCK} --recurrent-layers none"),
    "Memformer": Method(MEMFORMER, "--slots", (8, 32)),
    "Memorizing": Method(f"{MEMORIZING} --memory 512", whole_documents=False),
    "recurrent GPT-2": Method(f"{GPT2} --module-width 64", "--vectors", (1, 4)),
    "GPT-2": Method(f"{GPT2} --vectors 0"),
}
DISTANCES = (1, 4, 16, 64, 256, 1024)  # segments from the facts to the questions
FARTHEST = 16  # of them in training


def task(distance: int = 4, questions: int = 32, **others: int) -> RecallConfig:
    """A task whose questions come after `distance` segments of filler, one after another; in training nearer too."""
    return RecallConfig(distance=distance * SEGMENT, questions=questions, spacing=2, vary_distance=True, **others)


DISTANCE = task(FARTHEST)
CAPACITY = task(pairs=64, values=2, vary_pairs=True)
FACTS = (2, 4, 8, 16, 32, 64)  # asked of it
TASKS = {
    "rewriting": task(rewrites=8),
    "copying": task(task="copying", pairs=8, questions=8),
    "bAbI 1": task(task="one_fact", pairs=8),
    "bAbI 2": task(task="two_facts", pairs=12),
}


class Cell(NamedTuple):
    """What is asked of every method: the task that it learns, with the usual state or the large one, and words for eval.py."""

    label: str
    task: RecallConfig
    size: int = 0
    asked: str = ""


OF_DISTANCE = tuple(Cell(f"distance {far:,}", DISTANCE, asked=f"--recall-distance {far * SEGMENT}") for far in DISTANCES)
STATES = "", ", large"
FAMILY = "recall"  # the picture of all tables
OF_CAPACITY = tuple(
    Cell(f"{number} facts{state}", CAPACITY, size, f"--recall-pairs {number}")
    for size, state in enumerate(STATES)
    for number in FACTS
)
OF_TASKS = {label: Cell(label, config) for label, config in TASKS.items()}
CHANCE = {cell.label: cell.task.chance for cell in (*OF_DISTANCE, *OF_CAPACITY, *OF_TASKS.values())}  # of a guess
LANES = 16  # read at a time
RECALL_RATES = ("--learning-rate 0.0006", "--learning-rate 0.0015", "--learning-rate 0.004")
TASK_RATES = (*RECALL_RATES, "--learning-rate 0.010")  # with three some were best at an end
CAPACITY_RATES = ("--learning-rate 0.0003", *TASK_RATES)


def documents_to_read(config: RecallConfig) -> int:
    """How many documents a method reads to learn a task: those of 8, 4 or 2.5 million tokens."""
    return {DISTANCE: 8_000_000, CAPACITY: 4_000_000}.get(config, 2_500_000) // config.length


def training_options(method: Method, config: RecallConfig) -> str:
    """How a method learns a task: every method reads as many documents, in updates as it is usually trained."""
    segments = -(-config.length // method.segment)  # of a document
    horizon, lanes = (segments, LANES) if method.whole_documents else (1, 4 * LANES)
    steps = documents_to_read(config) * segments // (lanes * horizon)
    return f"--segment {method.segment} --horizon {horizon} --batch {lanes} --steps {steps} --warmup {max(10, steps // 20)}"


def text_options(method: Method) -> str:
    """How a method reads text: every method reads 64 bytes of some lanes in an update, or 16 of four times as many."""
    horizon = SEGMENT * BLOCKS // method.segment if method.whole_documents else 1
    lanes = "{lanes}" if method.segment * horizon == SEGMENT * BLOCKS else "{four times the lanes}"
    return f"--segment {method.segment} --horizon {horizon} --batch {lanes} --backprop through_time"


def task_options(config: RecallConfig) -> str:
    """The options of train.py that give this task, whatever a preset says."""
    values = asdict(config) | {"documents": None}
    return join(
        *(option_name(f"recall_{name}") + ("" if value is True else f" {value}") for name, value in values.items() if value)
    )


def rows(cells: tuple[Cell, ...]) -> tuple[Row, ...]:
    """Every cell of every method; a method that has no size of its state has no large one."""
    found = []
    for name, method in METHODS.items():
        for cell in cells:
            if method.size or not cell.size:
                options = join(method.with_state(cell.size), training_options(method, cell.task), task_options(cell.task))
                found.append(Row(f"{name}: {cell.label}", options, sizes={"asked": cell.asked}))
    return tuple(found)


RIGHT = Measure("right", lambda answer: answer["accuracy"], "score --split test {asked}")


def accuracies(record: dict) -> dict[str, dict[str, list[float]]]:
    """{method: {task: right answers by seed}} of a record."""
    found = {}
    for row in record["rows"]:
        method, _, asked = row["name"].partition(": ")
        found.setdefault(method, {})[asked] = row["measured"][RIGHT.title]
    return found


def percent(values: list[float | None]) -> str:
    """The mean and the spread of accuracies, in percent; empty if there are none."""
    return mean_and_spread([None if value is None else 100 * value for value in values], ".1f") if values else ""


def results(table: Table, record: dict) -> str:
    """The accuracy of each method in each task, in percent: the mean of the seeds, and the least and the most."""
    found, parts = accuracies(record), []
    tasks = list(next(iter(found.values())))
    half = -(-len(found) // 2)
    for methods in (list(found)[:half], list(found)[half:]):
        cells = ([asked, *(percent(found[m].get(asked, [])) for m in methods)] for asked in tasks)
        parts.append(markdown_table(["right answers, percent", *methods], *cells))
    return "\n\n".join(parts)


def results_of_task(table: Table, record: dict) -> str:
    """The accuracy of each method in the only task of a record."""
    lines = ([method, *map(percent, own.values())] for method, own in accuracies(record).items())
    return markdown_table(["method", "right answers, percent"], *lines)


def capacity_results(table: Table, record: dict) -> str:
    """The accuracies, and how many facts each method knows at most with each state, if it guesses the others."""
    found = accuracies(record)

    def known(method: str, state: str) -> str:
        asked = {number: f"{number} facts{state}" for number in FACTS}
        means = {number: mean_of(found[method].get(cell, [])) for number, cell in asked.items()}
        return f"{max(number * above_guess(mean, CAPACITY.chance) for number, mean in means.items()):.0f}".replace("nan", "")

    cells = ([method, *(known(method, state) for state in STATES)] for method in found)
    formula = """Facts that a method knows at most, if it guesses the others: the largest n (2 a - 1) over the numbers of facts n,
    with a the mean of its right answers."""
    most = markdown_table(["facts known at most", "the usual state", "four times as large"], *cells)
    return f"{results(table, record)}\n\n{wrapped(formula)}\n\n{most}"


def draw_family(record: dict, path: Path) -> None:
    """Draw methods, with their usual states, by the tasks of all tables of recall whose records of this scale are beside it."""
    found: dict[str, dict[str, list[float]]] = {}
    for own_path in (path.with_name(f"{stem(name, record['scale'])}.json") for name in RECALL):
        if own_path.exists():
            for method, own in accuracies(json.loads(own_path.read_text())).items():
                own = {asked: values for asked, values in own.items() if not asked.endswith(STATES[1])}
                found.setdefault(method, {}).update(own)
    draw_accuracies(found, path)


def draw_with_family(draw: Callable[[dict, Path], None]) -> Callable[[dict, Path], None]:
    """What draws a table's own picture, and the family's anew."""

    def both(record: dict, path: Path) -> None:
        draw(record, path)
        draw_family(record, path.with_name(f"{stem(FAMILY, record['scale'])}.svg"))

    return both


def draw_accuracies(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw methods by tasks: accuracies as numbers, coloured from a guess's to 1."""
    tasks = list(dict.fromkeys(asked for own in found.values() for asked in own))
    figure = figure_class()(figsize=(0.62 * len(tasks) + 2.4, 0.42 * len(found) + 1.8), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    means = [[mean_of(own.get(asked, [])) for asked in tasks] for own in found.values()]
    shades = [[above_guess(mean, CHANCE[asked]) for mean, asked in zip(line, tasks, strict=True)] for line in means]
    image = axes.imshow(shades, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for y, line in enumerate(means):
        for x, mean in enumerate(line):
            if mean == mean:  # not NaN: the method has no such cell
                colour = "black" if shades[y][x] > 0.6 else "white"
                axes.text(x, y, f"{100 * mean:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(tasks)), tasks, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(found)), found)
    axes.set_title("Right answers, percent, mean of three seeds")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes).set_ticks([0, 1], labels=["a guess", "all right"])
    save_figure(figure, path)


def above_guess(accuracy: float, chance: float) -> float:
    """How far an accuracy is on the way from a guess's to 1; below a guess 0."""
    return max(0.0, (accuracy - chance) / (1 - chance)) if accuracy == accuracy else accuracy


def draw_lines(axes: Any, record: dict, asked: dict[int, str], guess: int) -> None:
    """Draw accuracy against the numbers of `asked`, {number: cell}, a line for each method that has these, and a guess's."""
    for number, (method, own) in enumerate(accuracies(record).items()):
        if {*asked.values()} <= {*own}:
            means = [100 * mean_of(own[cell]) for cell in asked.values()]
            style = {"color": f"C{number}", "marker": "osv^D<>P"[number], "linestyle": "--" if number % 2 else "-"}
            axes.plot([*asked], means, **style, markersize=5, label=method)
    axes.axhline(guess, color="0.5", linewidth=1, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks([*asked], [f"{place:,}" for place in asked])
    axes.set(ylabel="right answers, percent", ylim=(0, 104))


def draw_capacity(record: dict, path: Path) -> None:
    """Draw accuracy against the number of facts, with the usual states and the large ones."""
    figure = figure_class()(figsize=(10, 4.2), dpi=150, layout="constrained")
    for axes, state, title in zip(figure.subplots(1, 2), STATES, ("The usual state", "Four times as large"), strict=True):
        draw_lines(plain_axes(axes), record, {number: f"{number} facts{state}" for number in FACTS}, 50)
        axes.set(xlabel="facts that a document begins with", title=title, ylim=(40, 102))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_distances(record: dict, path: Path) -> None:
    """Draw accuracy against distance, a line for each method."""
    figure, axes = new_figure()
    draw_lines(axes, record, {distance: f"distance {distance:,}" for distance in DISTANCES}, 10)
    axes.set_xlabel("segments of 16 tokens between the facts and the first question")
    axes.axvspan(FARTHEST, DISTANCES[-1], color="0.96")
    axes.text(FARTHEST * 4.5, 60, "farther than in training", fontsize=8, color="0.4")
    axes.set_title("Four facts, asked for later")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


COMMON = """All have one width, read in segments of 16 tokens (Block-Recurrent and Slide in four blocks of 16, Memorizing in
    segments of 64) and learn from as many documents"""
RECALL_SIZES = "--dropout 0 --validation-segments 0 --data recall"


def recall_table(
    title: str, about: str, cells: tuple[Cell, ...], draw: Callable[[dict, Path], None],
    grid: tuple[str, ...] = RECALL_RATES, results: Callable[[Table, dict], str] = results, **others: Any,
) -> Table:  # fmt: skip
    """A table of right answers; the methods' costs are those of ON_TEXT."""
    scales = {
        "small": Scale(f"{RECALL_SIZES} --width 64 --heads 4 --feed-forward 256", {"E": 16}, grid),
        "gpu": Scale(f"{RECALL_SIZES} --width 256 --heads 4 --feed-forward 1024", {"E": 64}, grid),
    }
    return Table(title, about, rows(cells), (RIGHT,), (), scales, timed=False, results=results, draw=draw, **others)


def last_losses(records: list[dict]) -> float:
    """The mean training loss of the last tenth of a run, in bits per byte: of documents that no update has read before."""
    if "diverged" in records[-1]:
        return math.inf
    found = [(record["step"], record["bits_per_byte"]) for record in records if "loss" in record]
    return statistics.mean(bits for step, bits in found if step > 0.9 * found[-1][0])


ABOUT_TASKS = {  # title and what is asked
    "rewriting": (
        "What a memory does with a change",
        "Four facts open a document; eight times in the filler one of them changes. The last value counts.",
    ),
    "copying": (
        "What a memory picks from filler",
        "Eight values stand anywhere in the filler of a document, and are asked for in their order (selective copying).",
    ),
    "bAbI 1": (
        "One fact of a story",
        """Who is where: people walk from place to place in a story with filler between, made after bAbI's first task. The place
            that was named last would be right a third of the time.""",
    ),
    "bAbI 2": (
        "Two facts of a story",
        """Where is what somebody took: people walk and take things, made after bAbI's second task. An answer needs two facts.
            The place that was named last would be right a quarter of the time, the place of whoever took something last 45%.""",
    ),
}
RECALL = {
    "recall-distance": recall_table(
        "How far a memory reaches",
        f"""Four facts open a document, and are asked for after 1 to 1,024 segments of filler. Every method is trained from
        nothing. Half of its documents have at most one segment of filler, a quarter one to four, a quarter four to {FARTHEST}:
        nearer questions teach first. Distances above {FARTHEST} show whether it goes on to longer documents. A document has 32
        questions, two tokens apart; at distance 1 the first of them are still within reach of Slide's attention. A guess is
        right one time in ten. {COMMON}: {documents_to_read(DISTANCE):,}, 8 million tokens.""",
        OF_DISTANCE,
        draw_with_family(draw_distances),
    ),
    "recall-capacity": recall_table(
        "How much a memory holds",
        f"""2 to 64 facts, with one of two values, open a document and are asked for after 4 segments of filler. Every method
        learns from documents with up to 64 facts, as many with 1 to 7 as with 8 to 64, and up to 4 segments of filler. The large
        state has four times the rows that hold facts; Memorizing's usual one holds a whole document. A guess is right one time
        in two. {COMMON}: {documents_to_read(CAPACITY):,}, 4 million tokens.""",
        OF_CAPACITY,
        draw_with_family(draw_capacity),
        CAPACITY_RATES,
        capacity_results,
        tuned_by=("the loss on the last tenth of its documents, which have 1 to 64 facts and are read once", last_losses),
    ),
    **{
        f"recall-{label.lower().replace(' ', '-')}": recall_table(
            title,
            f"""{about}

            The questions come after 4 segments of filler, in training after up to 4. Every method is trained from nothing; a
            guess is right one time in ten. {COMMON}: {documents_to_read(TASKS[label]):,}, 2.5 million tokens.""",
            (OF_TASKS[label],),
            draw_family,
            TASK_RATES,
            picture=FAMILY,
            results=results_of_task,
        )
        for label, (title, about) in ABOUT_TASKS.items()
    },
}

TEXT = {  # options and sizes
    "small": (SMALL, {"E": 16, "lanes": 64, "four times the lanes": 256}),
    "gpu": (GPU, {"E": 64, "lanes": 1024, "four times the lanes": 4096}),
}
TEXT_RATES = ("--learning-rate 0.002", *RATES)
ON_TEXT = Table(
    title="Eight methods on the same text",
    about="""What is each memory worth on text? The methods of [what a memory can hold](recall.md), with the same sizes, read
    bytes of the standard library in segments of 16; in an update all read equally many, and gradient passes through 64 bytes
    of a document where it passes between segments at all. The methods have different numbers of parameters and different
    costs: see below. Numbers are bits per byte on the test split, with the state carried and with it cleared at every segment;
    Block-Recurrent, Slide and Memorizing have segments of four blocks, so clearing takes less from them, and Memorizing's
    local attention reaches four times as far.""",
    rows=tuple(Row(name, join(METHODS[name].with_state(), text_options(METHODS[name]))) for name in METHODS),
    measures=(CARRIED, CLEARED),
    orderings=(
        Ordering("compression helps, at equal rows of memory", "compressive", "Transformer-XL"),
        Ordering("recurrent states help", "block-recurrent", "Slide"),
        Ordering("a vector helps", "recurrent GPT-2", "GPT-2"),
        *(
            Ordering(f"what {name} carries helps", name, f"{name} | {CLEARED.title}")
            for name in METHODS
            if name != "GPT-2"  # it carries nothing
        ),
    ),
    scales={
        name: Scale(f"{options} --dropout 0 --validation-segments 0", own, TEXT_RATES) for name, (options, own) in TEXT.items()
    },
)
TABLES = RECALL | {"methods": ON_TEXT}
