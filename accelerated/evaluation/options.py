"""The command line of eval.py: its reports and their options. It imports no torch, so a typo and --help are answered at once.

A new report is a line of HELP, a row of REPORTS, and a file with a function (run, options) -> (record, lines): plain values for
--json, and the text to print.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accelerated.data.config import DataConfig, check_data
from accelerated.evaluation.figures import check_figure
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, option_name
from accelerated.program.files import check_writable
from accelerated.program.parser import OptionParser, whole_numbers
from accelerated.training.fields import add_data_dir
from accelerated.training.options import make_absolute
from accelerated.training.settings import DEVICES

HELP = """Evaluate a trained model on documents, with its state carried through each of them; or continue a text.
RUN is a folder that train.py wrote, or eval.py export, or a published GPT-2.

  python eval.py score RUN --split test                   bits per byte, perplexity and log-probability of a split
  python eval.py sample RUN --prompt 'def ' --top-p 0.98  a continuation of a text
  python eval.py positions RUN --plot positions.png       the loss by position in the document, with and without memory
  python eval.py frequency RUN                            the perplexity of words by how often training had them
  python eval.py overlap RUN RUN --overlaps 0,5           a table of pretrained_recurrence runs by overlap of their windows
  python eval.py range RUN --segments 8                   the loss by how many segments the memory has carried
  python eval.py slots RUN --segments 8                   what memformer's slots keep and read, and how far gradients reach
  python eval.py attention RUN --sequences 200            how much attention goes to each age of compressive memories
  python eval.py compression RUN --sequences 200          the attention-reconstruction loss of each compressive layer
  python eval.py topics RUN --contexts 1000               how near the topics of continuations are to those of contexts
  python eval.py dynamic RUN --learning-rate 2e-4         the score when training continues on the text that is scored
  python eval.py export RUN FOLDER                        a run as files, for other programs and for --init
  python eval.py view RUN --out page.html                 a page that shows token by token what the memory changed
  python eval.py curves RUN RUN --plot curves.png         the losses of runs, finished or not, in one plot

python eval.py RUN means python eval.py score RUN. Each report has its own options: python eval.py positions --help"""
EXAMPLES = {
    line.split()[2]: line.strip().split("  ", 1)
    for line in HELP.splitlines()
    if line.startswith("  python")
}


def number(kind: type, fits: Callable, expected: str) -> Callable:
    """A type for argparse: a number for which fits(number) is true."""

    def parse(text: str):
        if not fits(value := kind(text)):
            raise argparse.ArgumentTypeError(f"{text} was given; it must be {expected}")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least(least: int) -> Callable:
    """A type for argparse: a whole number that is at least `least`."""
    return number(int, lambda value: value >= least, f"at least {least}")


TEMPERATURE = number(
    float,
    lambda t: t == 0 or 0.001 <= t < math.inf,
    "0 for the most probable token, or at least 0.001",
)
PROBABILITY = number(float, lambda p: 0 < p <= 1, "above 0 and at most 1")
RATE = number(float, lambda rate: 0 < rate < math.inf, "positive and finite")
SEED = number(int, lambda seed: 0 <= seed < 1 << 32, "at least 0 and below 2^32")


def option(
    name: str, text: str, kind: Callable | None = None, metavar: str | None = None, **others: object
) -> tuple:
    """An option: its name, and what add_argument takes."""
    return name, {"help": text} | ({"type": kind, "metavar": metavar} if kind else {}) | others


OPENING = (  # of reports that open the runs
    option("--checkpoint", "checkpoint: last or best (default last)", str, "NAME", default="last"),
    option(
        "--device",
        "auto takes a GPU if there is one (default auto)",
        choices=DEVICES,
        default="auto",
    ),
)
JOINED = "carry memory from document to document, as in one text (default as trained)"
READING = (  # of reports that read documents
    option(
        "--data",
        "what to read, as for train.py's --data (default: what the run was trained on)",
        str,
        "DATA",
    ),
    option(
        "--split",
        "which split to read (default valid; overlap reads valid and test)",
        choices=("train", "valid", "test"),
    ),
    option(
        "--recall-distance",
        "of --data recall: tokens before the first question (default as trained)",
        at_least(0),
        "N",
    ),
    option("--recall-pairs", "of --data recall: facts (default as trained)", at_least(1), "N"),
    option("--carry-over-documents", JOINED, action=argparse.BooleanOptionalAction),
    option("--batch", "lanes, documents read at a time (default the run's)", at_least(1), "B"),
)
PLOT = option("--plot", "draw it too: .png, .pdf or .svg (needs the extra plot)", str, "FILE")
CLEAR = option("--clear-memory", "start every segment from the initial state", action="store_true")
NEW = "continue in a new window, which sees only the prompt's last token and the inserted vectors (pretrained_recurrence, 5.3)"
SAMPLING = (
    option("--tokens", "how many tokens to add (default 200)", at_least(1), "N", default=200),
    option("--prompt", "text to continue (default a newline)", os.fsencode, "TEXT"),
    option(
        "--prompt-file",
        "file to continue, of any length",
        lambda p: Path(p).read_bytes(),
        "FILE",
    ),
    option(
        "--temperature",
        "below 1 favours probable tokens; 0 takes the most probable (default 0.8)",
        TEMPERATURE,
        default=0.8,
    ),
    option(
        "--top-p",
        "sample from the fewest tokens with total probability P (default 1: all)",
        PROBABILITY,
        "P",
    ),
    option("--seed", "seed of the random numbers (default 0)", SEED, "N", default=0),
    option("--new-window", NEW, action="store_true"),
)
SEQUENCES = option(
    "--sequences", "segments to average over (default 1000)", at_least(2), "N", default=1000
)
TOPICS = (
    option(
        "--contexts",
        "contexts of a window to continue (default 1000; the paper 8000)",
        at_least(2),
        "N",
        default=1000,
    ),
    option(
        "--tokens",
        "how many tokens to continue each by (default 30, the paper's)",
        at_least(1),
        "N",
        default=30,
    ),
    option("--seed", "seed of the contexts and the topic model (default 0)", SEED, "N", default=0),
)
PAGE = (
    option(
        "--out", "the page to write; nothing is overwritten (required)", str, "FILE", required=True
    ),
    option("--from", "the first segment to show", at_least(1), "S", dest="first", default=1),
    option(
        "--segments",
        "how many segments to show (default those of about 16,384 tokens)",
        at_least(1),
        "K",
    ),
)
OVERLAPS = option(
    "--overlaps",
    "tokens that a window shares with the previous one (default each run's)",
    whole_numbers,
    "O,...",
)
REACH = option(
    "--segments",
    "how many segments back to follow gradients (default 8)",
    at_least(2),
    "K",
    default=8,
)
SEGMENTS = option(
    "--segments", "clear it every K segments (required)", at_least(2), "K", required=True
)
CONSTANT = option(
    "--learning-rate",
    "constant (required); first try a tenth of the run's own",
    RATE,
    "RATE",
    required=True,
)
FOLDER = option(
    "folder", "where to write it; a folder that does not exist yet, or is empty", str, "FOLDER"
)


class Report(NamedTuple):
    """A subcommand of eval.py."""

    function: str  # module and name, below accelerated
    options: tuple = ()  # of its own
    model: str | None = None  # the only model that has this report
    splits: tuple[str, ...] = ("valid",)  # read if --split is not given
    several: bool = False  # whether it takes a list of runs
    opens: bool = True  # whether it takes opened runs; otherwise their paths
    exact: bool = False  # whether bfloat16 is off, because small differences matter
    sizes: bool = True  # whether it can evaluate with other sizes than those of training
    config: str = ""  # of a function (config, sizes, options) -> config to evaluate with


GPT2, COMPRESSIVE = {"model": "pretrained_recurrence"}, {"model": "compressive", "exact": True}
SEVERAL = {
    "several": True,
    "splits": ("valid", "test"),
    "config": "evaluation.overlap.first_config",
}
REPORTS = {
    "score": Report("evaluation.score.report", (CLEAR,)),
    "sample": Report("evaluation.sample.report", SAMPLING, splits=()),
    "positions": Report("evaluation.positions.report", (PLOT,)),
    "frequency": Report("lab.reports.frequency.report"),
    "overlap": Report("evaluation.overlap.report", (OVERLAPS, CLEAR), **GPT2, **SEVERAL),
    "range": Report("lab.reports.range.report", (SEGMENTS,)),
    "slots": Report("lab.reports.slots.report", (REACH,), model="memformer", exact=True),
    "attention": Report("lab.reports.memories.report_attention", (SEQUENCES,), **COMPRESSIVE),
    "compression": Report(
        "lab.reports.memories.report_compression",
        (SEQUENCES,),
        **COMPRESSIVE,
        config="lab.reports.memories.reconstructing",
    ),
    "topics": Report("lab.reports.topics.report", TOPICS, **GPT2, sizes=False),
    "dynamic": Report(
        "lab.reports.dynamic.report", (CONSTANT,), exact=True
    ),  # bfloat16 would round small steps away
    "export": Report("evaluation.export.report", (FOLDER,), splits=(), exact=True, sizes=False),
    "view": Report("evaluation.view.report", PAGE, sizes=False),
    "curves": Report(
        "lab.reports.curves.report",
        (PLOT,),
        splits=(),
        several=True,
        opens=False,
        sizes=False,
    ),
}


def models_by_size() -> dict[str, list[str]]:
    """{size that can change after training: the models that have it}, as the models' presets say."""
    models: dict[str, list[str]] = {}
    for model in NAMES:
        for size in getattr(presets_of(model), "EVALUATION_SIZES", ()):
            models.setdefault(size, []).append(model)
    return models


def report_parser(name: str) -> OptionParser:
    """The parser of one report; it has only the options that the report uses."""
    report, (example, text) = REPORTS[name], EXAMPLES[name]
    usage = f"{example.partition(' -')[0].replace('RUN RUN', 'RUN [RUN ...]')} [options]"
    about = {"description": f"{text.strip().capitalize()}.", "epilog": f"example: {example}"}
    parser = OptionParser(prog=f"eval.py {name}", allow_abbrev=False, usage=usage, **about)
    opened = "a folder that train.py or eval.py export wrote, or a published GPT-2"
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help=opened if report.opens else "a folder that train.py wrote",
    )
    for word, how in (
        *report.options,
        *(READING if report.splits else ()),
        *(OPENING if report.opens else ()),
    ):
        parser.add_argument(word, **how)
    for size, models in models_by_size().items() if report.sizes else ():
        if report.model in (None, *models):
            presets = presets_of(models[0])
            text = f"{presets.HELP[size]} ({', '.join(models)}; default the run's)"
            kind = type(getattr(presets.Config, size))
            parser.add_argument(option_name(size), type=kind, metavar="SIZE", help=text)
    if report.splits:
        add_data_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """Return (name of the report, its options) of a command line; raises InputError for what no run can do."""
    if argv[:1] in (["-h"], ["--help"]):
        print(HELP)
        raise SystemExit
    named = bool(argv) and argv[0] in REPORTS
    name, rest = (argv[0], argv[1:]) if named else ("score", argv)
    if not named and argv and not argv[0].startswith("-") and not Path(argv[0]).exists():
        check_choice("this is no run's folder, and the report", argv[0], REPORTS, InputError)
    options = report_parser(name).parse(rest)
    if len(options.runs) > 1 and not REPORTS[name].several:
        several = " and ".join(name for name, report in REPORTS.items() if report.several)
        raise InputError(
            f"{len(options.runs)} runs were given; only eval.py {several} take more than one"
        )
    if getattr(options, "data", None):
        make_absolute(vars(options))  # as a run has it
        check_data(DataConfig(options.data))
    if getattr(options, "plot", None):
        check_figure(options.plot)
    if getattr(options, "out", None):
        if os.path.lexists(options.out):
            raise InputError(
                f"--out {options.out} exists, and nothing is overwritten; give another --out"
            )
        check_writable(Path(options.out), "give another --out")
    return name, options
