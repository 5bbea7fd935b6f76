"""Memformer: Tables 1 and 2, Figures 3a to 3c; Table 3 is `python -m accelerated.lab.speed horizons --model memformer`."""

import statistics
from itertools import pairwise
from pathlib import Path

from accelerated.lab.tables.page import mean_of, results
from accelerated.lab.tables.table import CARRIED, CLEARED, GPU, RATES, SMALL, Measure, Ordering, Row, Scale, Table, of_test
from accelerated.lab.trials import join
from accelerated.training.log import new_figure, save_figure

PERPLEXITY = Measure("test, perplexity per token", *of_test("perplexity"), ".2f")
# Both kinds of model read as many tokens in an update: Memformer in rollouts of several segments, Transformer-XL in more lanes
SCALES = {
    "small": Scale(
        f"{SMALL} --head-width 16 --segment 16",
        {"M": 16, "2M": 32, "4M": 64, "M / 2": 8, "distances": 32, "reach": 80, "all lanes": 256, "lanes": 64, "horizon": 4,
         "layers": 3, "more layers": 4, "encoder": 1, "decoder": 2},
        RATES,
    ),
    "gpu": Scale(
        f"{GPU} --head-width 64 --segment 64",
        {"M": 32, "2M": 64, "4M": 128, "M / 2": 16, "distances": 64, "reach": 192, "all lanes": 512, "lanes": 128, "horizon": 4,
         "layers": 12, "more layers": 16, "encoder": 4, "decoder": 8},
        RATES,
    ),
}  # fmt: skip
# The best rates of Tables 1 and 2 are near each other; every row is tuned on the whole validation split, whatever its lanes
TUNED = {
    name: scale._replace(
        options=f"{scale.options} --validation-segments 0",
        grid=("--learning-rate 0.006", "--learning-rate 0.010", "--learning-rate 0.018"),
    )
    for name, scale in SCALES.items()
}
XL = (
    "--model compressive --positions simplified --max-distance {reach} --compressed-memory 0 --layers {layers} "
    "--batch {all lanes}"
)
MEMFORMER = (
    "--model memformer --encoder-layers {encoder} --decoder-layers {decoder} --slots {M} --retention 4 --backprop memory_replay "
    "--max-distance {distances} --batch {lanes} --horizon {horizon}"
)
INFILLING, RECALL = "--task-infilling 0.3", "--task-recall 0.1"

TABLE_1 = Table(
    title="Memformer, Table 1",
    about="""Which memory of a few rows is best at equal widths and segments? Transformer-XL with M, 2 M and 4 M rows a layer,
    the same with a third more layers, a Compressive Transformer with half of the rows compressed, and the Memformer
    encoder-decoder with M slots in all, alone and with its two other tasks. All use the simplified positions, as in the paper,
    whose column is items per second and perplexity on WikiText-103. All rows read equal numbers of tokens in an update.""",
    rows=(
        Row("Transformer-XL, M", f"{XL} --memory {{M}}", "1,136; 23.52"),
        Row("Transformer-XL, 2 M", f"{XL} --memory {{2M}}", "928; 22.44"),
        Row("Transformer-XL, 4 M", f"{XL} --memory {{4M}}", "805; 21.49"),
        Row("Transformer-XL large, 2 M", f"{XL} --layers {{more layers}} --memory {{2M}}", "745; 21.95"),
        Row("Transformer-XL large, 4 M", f"{XL} --layers {{more layers}} --memory {{4M}}", "640; 21.25"),
        Row("Compressive, M / 2 (M / 2)", f"{XL} --memory {{M / 2}} --compressed-memory {{M / 2}}", "746; 22.79"),
        Row("Compressive, M (M)", f"{XL} --memory {{M}} --compressed-memory {{M}}", "702; 21.98"),
        Row("Memformer, M", MEMFORMER, "994; 21.26"),
        Row("Memformer, infilling", f"{MEMFORMER} {INFILLING}", "994; 21.19"),
        Row("Memformer, recall", f"{MEMFORMER} {RECALL}", "994; 21.53"),
        Row("Memformer, all tasks", f"{MEMFORMER} {INFILLING} {RECALL}", "994; 21.11"),
    ),
    measures=(PERPLEXITY, CARRIED, CLEARED),
    orderings=(
        Ordering("more memory helps Transformer-XL: 2 M", "Transformer-XL, 2 M", "Transformer-XL, M"),
        Ordering("more memory helps Transformer-XL: 4 M", "Transformer-XL, 4 M", "Transformer-XL, 2 M"),
        Ordering("more layers help Transformer-XL, 2 M", "Transformer-XL large, 2 M", "Transformer-XL, 2 M"),
        Ordering("more layers help Transformer-XL, 4 M", "Transformer-XL large, 4 M", "Transformer-XL, 4 M"),
        Ordering("at M rows, half of them compressed is better", "Compressive, M / 2 (M / 2)", "Transformer-XL, M"),
        Ordering("at 2 M rows, half of them compressed is better", "Compressive, M (M)", "Transformer-XL, 2 M"),
        Ordering("Memformer is better than Transformer-XL with as many rows", "Memformer, M", "Transformer-XL, M"),
        Ordering("and with 4 M rows", "Memformer, M", "Transformer-XL, 4 M"),
        Ordering("and large with 4 M rows (21.26 and 21.25)", "Memformer, M", "Transformer-XL large, 4 M"),
        Ordering("and than the Compressive Transformer (21.98)", "Memformer, M", "Compressive, M (M)"),
        Ordering("infilling helps", "Memformer, infilling", "Memformer, M"),
        Ordering("recall alone does not", "Memformer, M", "Memformer, recall"),
        Ordering("all tasks together are best", "Memformer, all tasks", "Memformer, infilling"),
    ),
    scales=TUNED,
)  # fmt: skip

TABLE_2 = Table(
    title="Memformer, Table 2",
    about="""Relative positions on a Transformer-XL: those of Transformer-XL, or the simplified ones of Memformer (Eqs. 2 to 4).
    The paper's column is milliseconds, GFLOPs, parameters of the layer, and perplexity.""",
    rows=(
        Row("transformer_xl", f"{XL} --memory {{2M}} --positions transformer_xl", "1.27; 68.99; 1.32M; 23.32"),
        Row("simplified", f"{XL} --memory {{2M}}", "0.88; 68.72; 1.05M; 21.74"),
    ),
    measures=(PERPLEXITY, CARRIED, CLEARED),
    orderings=(Ordering("the simplified positions are better", "simplified", "transformer_xl"),),
    scales=TUNED,
)

HORIZONS, SLOTS = (1, 2, 4, 8, 16, 32), (1, 4, 8, 16, 32, 64)


def draw_ablations(record: dict, path: Path) -> None:
    """Draw Figures 3b and 3c: perplexity against the horizon and against the slots, the mean and the seeds."""
    figure, axes = new_figure()
    title = PERPLEXITY.title
    measured = {row["name"]: row["measured"][title] for row in record["rows"]}
    for label, sizes in (("horizon", HORIZONS), ("slots", SLOTS)):
        points = [(size, measured[f"{label} {size}"]) for size in sizes]
        axes.plot([size for size, _ in points], [mean_of(found) for _, found in points], marker="o", label=label)
        axes.plot([size for size, found in points for _ in found], [value for _, found in points for value in found],
                  ".", color="0.6", markersize=3)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="horizon in segments, or slots", ylabel=title, title="Memformer, Figures 3b and 3c")
    axes.xaxis.set_major_formatter(lambda position, _: f"{position:,.0f}")
    axes.legend(frameon=False)
    save_figure(figure, path)


FIGURES_3B_AND_3C = Table(
    title="Memformer, Figures 3b and 3c",
    about="""How many segments must gradients pass through (Figure 3b), and how many slots help (Figure 3c)? Rows with a longer
    horizon have fewer lanes, so that all read equal numbers of tokens in an update; few lanes harm a short training by
    themselves ([log](log.md#2026-11-23)). The paper finds horizon 1 the worst and little gain beyond 16, and much gain from 1
    slot to 8 and none beyond 32.""",
    rows=(
        *(Row(f"horizon {horizon}", f"{MEMFORMER} --horizon {horizon} --batch {{lanes at {horizon}}}") for horizon in HORIZONS),
        *(Row(f"slots {slots}", f"{MEMFORMER} --slots {slots}") for slots in SLOTS),
    ),
    measures=(PERPLEXITY, CLEARED._replace(title="cleared, bits per byte")),
    orderings=(
        *(Ordering(f"horizon {b} is better than {a}", f"horizon {b}", f"horizon {a}") for a, b in pairwise(HORIZONS)),
        Ordering("horizon 1 is the worst: 32 is better", "horizon 32", "horizon 1"),
        Ordering("8 slots are better than 1", "slots 8", "slots 1"),
        *(Ordering(f"{slots} slots are no better than 8", "slots 8", f"slots {slots}") for slots in (16, 32)),
    ),
    scales={
        name: scale._replace(sizes=scale.sizes | {f"lanes at {h}": scale.sizes["all lanes"] // h for h in HORIZONS})
        for name, scale in SCALES.items()
    },
    draw=draw_ablations,
)  # fmt: skip

VALIDATED = tuple(range(25, 401, 25))  # updates after which Figure 3a's curves have a point


def validations(answer: dict) -> dict[int, float]:
    """{update: bits per byte of the validation after it} of a run's log."""
    records = [r for r in answer["records"] if "validation_bits_per_byte" in r and not r.get("final")]
    return {record["step"]: record["validation_bits_per_byte"] for record in records}


def rise(answer: dict) -> float:
    """How far the last validation is above the best one: over-fitting."""
    bits = [*validations(answer).values()]
    return bits[-1] - min(bits)


def roughness(answer: dict) -> float:
    """How much a validation is off the line through its neighbours, on average."""
    bits = [*validations(answer).values()]
    return statistics.mean(abs(b - (a + c) / 2) for a, b, c in zip(bits, bits[1:], bits[2:], strict=False))


def after(update: int) -> Measure:
    """The validation after an update."""
    return Measure(f"after {update}", lambda answer: validations(answer)[update])


BEST = Measure("best validation, bits per byte", lambda answer: min(validations(answer).values()))
RISE = Measure("last above best", rise)
ROUGHNESS = Measure("roughness", roughness, form=".4f")


def numbers_of_curves(table: Table, record: dict) -> str:
    """The results without the curves' points, which the picture shows."""
    shown = (BEST, RISE, ROUGHNESS)
    rows = [row | {"measured": {m.title: row["measured"][m.title] for m in shown}} for row in record["rows"]]
    return results(table._replace(measures=shown), record | {"rows": rows})


def draw_curves(record: dict, path: Path) -> None:
    """Draw Figure 3a: validation against updates, a colour for each row and a line for each seed."""
    figure, axes = new_figure()
    for number, row in enumerate(record["rows"]):
        points = [row["measured"][after(update).title] for update in VALIDATED]
        for seed, line in enumerate(zip(*points, strict=True)):
            axes.plot(VALIDATED, line, color=f"C{number}", linewidth=1.2, label=None if seed else row["name"])
    axes.set(xlabel="updates", ylabel="validation, bits per byte", title="Memformer, Figure 3a")
    axes.legend(frameon=False)
    save_figure(figure, path)


WITH_TASKS = {"continuation": "", "infilling": INFILLING, "recall": RECALL, "all tasks": f"{INFILLING} {RECALL}"}
FIGURE_3A = Table(
    title="Memformer, Figure 3a",
    about="""Do Memformer's two other tasks, infilling and recall, keep it from over-fitting, and make the validation curve
    smoother? All rows read the same seven documents, 65 kB, about 25 times; in those with tasks, some lanes do a task instead of
    continuing the text. All have one learning rate: tuning it by the last validation would hide what is compared. Roughness is
    how far a validation is from the mean of those before and after it, on average, in bits.""",
    rows=tuple(
        Row(name, join(f"{MEMFORMER} --training-documents 7 --validate-every 25 --validation-segments 16", tasks))
        for name, tasks in WITH_TASKS.items()
    ),
    measures=(BEST, RISE, ROUGHNESS, *map(after, VALIDATED)),
    orderings=(
        Ordering("all tasks: less prone to over-fitting", f"all tasks | {RISE.title}", f"continuation | {RISE.title}"),
        Ordering("all tasks: a smoother curve", f"all tasks | {ROUGHNESS.title}", f"continuation | {ROUGHNESS.title}"),
        *(Ordering(f"{name}: less prone to over-fitting", f"{name} | {RISE.title}", f"continuation | {RISE.title}")
          for name in ("infilling", "recall")),
    ),
    scales={name: scale._replace(grid=("--learning-rate 0.006",)) for name, scale in SCALES.items()},
    draw=draw_curves, results=numbers_of_curves,
)  # fmt: skip

TABLES = {"memformer-1": TABLE_1, "memformer-2": TABLE_2, "memformer-3a": FIGURE_3A, "memformer-3bc": FIGURES_3B_AND_3C}
