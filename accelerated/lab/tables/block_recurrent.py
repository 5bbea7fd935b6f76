"""Block-Recurrent Transformers, Table 1 and section 4.5: gates, windows, states and layers, with the paper's baselines."""

from accelerated.lab.tables.table import CARRIED, CLEARED, GPU, RATES, SMALL, Ordering, Row, Scale, Table

GATES = [f"Rec:{gate}:{configuration}" for gate in ("lstm", "fixed") for configuration in ("dual", "single", "skip")]
# Every row reads as many tokens in an update (4.2): lanes times segment is the same
SCALES = {
    "small": Scale(
        f"--model block_recurrent {SMALL} --head-width 16 --layers 3 --window 16 --segment 64 --states 16 "
        "--recurrent-layers 2 --dropout 0 --batch 64",
        {"W": 16, "2W": 32, "4W": 64, "W / 2": 8, "S / 4": 4, "S / 2": 8, "2S": 32, "lanes of W": 256, "lanes of 2W": 128,
         "lanes of 4W": 64, "a layer more": 4, "adjacent": "1,2", "apart": "1,3"},
        RATES,
    ),
    "gpu": Scale(
        f"--model block_recurrent {GPU} --head-width 64 --layers 12 --window 128 --segment 1024 --states 128 "
        "--recurrent-layers 10 --dropout 0.05 --batch 32",
        {"W": 128, "2W": 256, "4W": 512, "W / 2": 64, "S / 4": 32, "S / 2": 64, "2S": 256, "lanes of W": 256, "lanes of 2W": 128,
         "lanes of 4W": 64, "a layer more": 13, "adjacent": "9,10", "apart": "4,10"},
        RATES,
    ),
}  # fmt: skip


def gate_options(name: str) -> str:
    """The options of a recurrent row such as Rec:lstm:dual."""
    kind, gate, configuration = name.split(":")
    return f"--gate {gate} --configuration {configuration}" + (" --feedback" if kind == "Feedback" else "")


PAPER_1 = {  # step time; bits per token on PG19's bytes and tokens, arXiv and GitHub
    "XL:W": "0.88; 1.01 3.62 1.45 1.28", "XL:2W": "1.20; 0.997 3.59 1.37 -", "XL:4W": "2.11; 0.990 3.58 1.31 -",
    "Slide": "0.93; 0.989 3.60 1.43 -", "Slide, a layer more": "1.00; 0.989 3.57 1.42 1.19",
    "Rec:lstm:dual": "1.06; 0.985 3.56 1.26 1.07", "Rec:lstm:single": "1.05; 0.962 3.55 1.29 1.05",
    "Rec:lstm:skip": "1.00; 0.969 3.56 1.31 -", "Rec:fixed:dual": "1.01; 0.957 3.54 1.27 1.03",
    "Rec:fixed:single": "1.02; 0.966 3.58 1.25 -", "Rec:fixed:skip": "0.99; 0.952 3.53 1.24 1.03",
    "Feedback:lstm:single": "1.40; 0.977 3.50 1.22 1.05", "Feedback:fixed:skip": "1.35; 0.935 3.49 1.24 1.11",
}  # fmt: skip
OPTIONS_1 = {
    "XL:W": "--recurrent-layers none --segment {W} --batch {lanes of W}",
    "XL:2W": "--recurrent-layers none --window {2W} --segment {2W} --batch {lanes of 2W}",
    "XL:4W": "--recurrent-layers none --window {4W} --segment {4W} --batch {lanes of 4W}",
    "Slide": "--recurrent-layers none",
    "Slide, a layer more": "--recurrent-layers none --layers {a layer more}",
} | {name: gate_options(name) for name in (*GATES, "Feedback:lstm:single", "Feedback:fixed:skip")}

TABLE_1 = Table(
    title="Block-Recurrent Transformers, Table 1",
    about="""Is recurrence in one layer worth more than a layer, or than a longer window? XL reads segments of one window with
    the previous one's keys and values; Slide reads several windows with gradient between them (four here, eight in the paper);
    Rec adds recurrent states to one layer, with either gate in three configurations; with Feedback every layer reads them. All
    rows read equal numbers of tokens in an update, as in the paper's 4.2. Its columns are the step time and the bits per token on
    PG19's bytes, PG19's tokens, arXiv and GitHub.""",
    rows=tuple(Row(name, OPTIONS_1[name], paper) for name, paper in PAPER_1.items()),
    measures=(CARRIED, CLEARED),
    orderings=(
        Ordering("a window twice as long is better (XL:1024 and XL:512)", "XL:2W", "XL:W"),
        Ordering("four times as long is better still", "XL:4W", "XL:2W"),
        Ordering("gradient between blocks helps (Slide:12L and XL:512)", "Slide", "XL:W"),
        Ordering("a layer more helps", "Slide, a layer more", "Slide"),
        Ordering("recurrence helps: Rec:fixed:skip and Slide", "Rec:fixed:skip", "Slide"),
        *(Ordering(f"{name} is better than a layer more", name, "Slide, a layer more") for name in GATES),
        Ordering("Rec:fixed:skip is better than the longest window", "Rec:fixed:skip", "XL:4W"),
        *(Ordering(f"Rec:fixed:skip is better than {name}", "Rec:fixed:skip", name) for name in GATES[:-1]),
        Ordering("fixed:single is the worst of the fixed gates: dual is better", "Rec:fixed:dual", "Rec:fixed:single"),
        Ordering("lstm:dual is the worst of the LSTM gates: skip is better", "Rec:lstm:skip", "Rec:lstm:dual"),
        Ordering("lstm:single is the best of them: better than skip", "Rec:lstm:single", "Rec:lstm:skip"),
        *(Ordering(f"{name} is better with the fixed gate", f"Rec:fixed:{name}", f"Rec:lstm:{name}")
          for name in ("dual", "single", "skip")),
        Ordering("feedback helps fixed:skip", "Feedback:fixed:skip", "Rec:fixed:skip"),
        Ordering("feedback helps lstm:single", "Feedback:lstm:single", "Rec:lstm:single"),
    ),
    scales=SCALES,
)  # fmt: skip

ABLATIONS = Table(
    title="Block-Recurrent Transformers, section 4.5",
    about="""The paper's ablations, which it tells in words: the number of recurrent states S, the window W with and without
    recurrence, and the number of recurrent layers, all with the gate fixed and the configuration skip.""",
    rows=(
        Row("Rec", gate_options("Rec:fixed:skip")),
        Row("Slide", "--recurrent-layers none"),
        *(Row(f"Rec, {size}", f"--states {{{size}}}") for size in ("S / 4", "S / 2", "2S")),
        *(Row(f"Rec, {size}", f"--window {{{size}}}") for size in ("W / 2", "2W")),
        *(Row(f"Slide, {size}", f"--recurrent-layers none --window {{{size}}}") for size in ("W / 2", "2W")),
        Row("Rec in two adjacent layers", "--recurrent-layers {adjacent}"),
        Row("Rec in two layers apart", "--recurrent-layers {apart}"),
        Row("Rec, a plain layer more", "--layers {a layer more}"),
    ),
    measures=(CARRIED, CLEARED),
    orderings=(
        Ordering("fewer states are worse: S / 2", "Rec", "Rec, S / 2"),
        Ordering("fewer states are worse: S / 4", "Rec, S / 2", "Rec, S / 4"),
        Ordering("recurrence helps", "Rec", "Slide"),
        Ordering("half the window costs Slide more than Rec", "Rec, W / 2 - Rec", "Slide, W / 2 - Slide"),
        Ordering("recurrence helps more at W / 2 than at 2 W", "Slide, 2W - Rec, 2W", "Slide, W / 2 - Rec, W / 2"),
        Ordering("two adjacent recurrent layers are no better than one", "Rec", "Rec in two adjacent layers"),
        Ordering("two layers apart are better than one", "Rec in two layers apart", "Rec"),
        Ordering("but no better than a plain layer more", "Rec, a plain layer more", "Rec in two layers apart"),
    ),
    scales=SCALES,
)

TABLES = {"block_recurrent-1": TABLE_1, "block_recurrent-4.5": ABLATIONS}
