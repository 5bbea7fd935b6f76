"""The command line of eval.py: its reports and their options.

It imports no torch, so a typo and --help are answered at once. A new report is a row of REPORTS,
and a file with a function (run, options) -> (record, lines): plain values for --json, and the text
to print.
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from accelerated.data.config import DataConfig, check_data
from accelerated.data.recall import RecallConfig
from accelerated.evaluation.figures import check_figure
from accelerated.models import NAMES, presets_of
from accelerated.program.errors import InputError, check_choice, option_name
from accelerated.program.files import check_writable
from accelerated.program.parser import OptionParser, whole_numbers
from accelerated.training.fields import add_data_dir, conversion, field_help
from accelerated.training.options import make_absolute
from accelerated.training.settings import DEVICES

Option = tuple[str, dict[str, Any]]  # its name, and what add_argument takes


def option(
    name: str, text: str, kind: Callable | None = None, metavar: str | None = None, **others: Any
) -> Option:
    """An option; if it has a kind, that converts what is given."""
    converted = {"type": kind, "metavar": metavar} if kind else {}
    return name, {"help": text} | converted | others


def number(kind: Callable, fits: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """A type for argparse: a number for which fits(number) is true."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text} was given; it must be {expected}")
        return value

    parse.__name__ = kind.__name__
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number that is at least `least`."""
    return number(int, lambda value: value >= least, f"at least {least}")


TEMPERATURE = number(
    float,
    lambda value: value == 0 or 0.001 <= value < math.inf,
    "0 for the most probable token, or at least 0.001",
)
PROBABILITY = number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
POSITIVE = number(float, lambda value: 0 < value < math.inf, "positive and finite")
SEED = number(int, lambda value: 0 <= value < 1 << 32, "at least 0 and below 2^32")

OPENING = (  # of reports that open the runs
    option("--checkpoint", "checkpoint: best or last (default best, if there is one)", str, "NAME"),
    option(
        "--device",
        "auto takes a GPU if there is one (default auto)",
        choices=DEVICES,
        default="auto",
    ),
)
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
        "--carry-over-documents",
        "carry memory from document to document, as in one text (default as trained)",
        action=argparse.BooleanOptionalAction,
    ),
    option("--batch", "lanes, documents read at a time (default the run's)", at_least(1), "B"),
)
# Of --data recall: fields of RecallConfig that need not be as trained
RECALL_SIZES = ("distance", "pairs", "begin", "rewrites", "distractors")
PLOT = option("--plot", "draw it too: .png, .pdf or .svg (needs the extra plot)", str, "FILE")
CLEAR = option("--clear-memory", "start every segment from the initial state", action="store_true")
SAMPLING = (
    option("--tokens", "how many tokens to add (default 200)", at_least(1), "N", default=200),
    option("--prompt", "text to continue (default a newline)", os.fsencode, "TEXT"),
    option(
        "--prompt-file",
        "file to continue, of any length",
        lambda path: Path(path).read_bytes(),
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
        default=1.0,
    ),
    option("--seed", "seed of the random numbers (default 0)", SEED, "N", default=0),
    option(
        "--new-window",
        "continue in a new window, which sees only the prompt's last token and the inserted "
        "vectors (pretrained_recurrence, 5.3)",
        action="store_true",
    ),
)
SEQUENCES = option(
    "--sequences", "segments to average over (default 1000)", at_least(2), "N", default=1000
)
PAGE = (
    option(
        "--out", "the page to write; nothing is overwritten (required)", str, "FILE", required=True
    ),
    option(
        "--from", "the first segment to show (default 1)", at_least(1), "S", dest="first", default=1
    ),
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
CONSTANT = option(
    "--learning-rate",
    "constant (required); first try a tenth of the run's own",
    POSITIVE,
    "RATE",
    required=True,
)
FOLDER = option(
    "folder", "where to write it; a folder that does not exist yet, or is empty", str, "FOLDER"
)
PROGRAM = option(
    "--program",
    "write program.pt2 too, which reads segments in any program that has torch",
    action="store_true",
)


class Report(NamedTuple):
    """A subcommand of eval.py."""

    example: str  # of its command line, after eval.py
    shows: str  # what the example shows
    function: str  # module and name, below accelerated
    options: tuple[Option, ...] = ()  # of its own
    model: str | None = None  # the only model that has this report
    splits: tuple[str, ...] = ("valid",)  # read if --split is not given
    several: bool = False  # whether it takes a list of runs
    exact: bool = False  # whether bfloat16 is off, because small differences matter
    sizes: bool = True  # whether it can evaluate with other sizes than those of training
    config: str = ""  # of a function (config, sizes, options) -> config to evaluate with


REPORTS = {
    "score": Report(
        "score RUN --split test",
        "bits per byte, perplexity and log-probability of a split",
        "evaluation.score.report",
        options=(CLEAR,),
    ),
    "documents": Report(
        "documents RUN --split test",
        "bits per byte of each document",
        "lab.reports.documents.report",
        options=(CLEAR,),
    ),
    "sample": Report(
        "sample RUN --prompt 'def ' --top-p 0.98",
        "a continuation of a text",
        "evaluation.sample.report",
        options=SAMPLING,
        splits=(),
    ),
    "positions": Report(
        "positions RUN --plot positions.png",
        "the loss by position in the document, with and without memory",
        "evaluation.positions.report",
        options=(PLOT,),
    ),
    "overlap": Report(
        "overlap RUN RUN --overlaps 0,5",
        "a table of pretrained_recurrence runs by overlap of their windows",
        "evaluation.overlap.report",
        options=(OVERLAPS, CLEAR),
        model="pretrained_recurrence",
        splits=("valid", "test"),
        several=True,
        config="evaluation.overlap.first_config",
    ),
    "attention": Report(
        "attention RUN --sequences 200",
        "how much attention goes to each age of compressive memories",
        "lab.reports.memories.report_attention",
        options=(SEQUENCES,),
        model="compressive",
        exact=True,
    ),
    "compression": Report(
        "compression RUN --sequences 200",
        "the attention-reconstruction loss of each compressive layer",
        "lab.reports.memories.report_compression",
        options=(SEQUENCES,),
        model="compressive",
        exact=True,
        config="lab.reports.memories.reconstructing",
    ),
    "dynamic": Report(
        "dynamic RUN --learning-rate 2e-4",
        "the score when a run of train.py, not an export, trains on what is scored",
        "lab.reports.dynamic.report",
        options=(CONSTANT,),
        exact=True,  # bfloat16 would round small steps away
    ),
    "export": Report(
        "export RUN FOLDER",
        "a run as files, for other programs and for --init",
        "export.folder.report",
        options=(FOLDER, PROGRAM),
        splits=(),
        exact=True,
        sizes=False,
    ),
    "view": Report(
        "view RUN --out page.html",
        "a page that shows token by token what the memory changed",
        "evaluation.view.report",
        options=PAGE,
        sizes=False,
    ),
}
INTRODUCTION = """\
Evaluate a trained model on documents, with its state carried through each of them; or continue a
text. RUN is a folder that train.py wrote, or eval.py export, or a published decoder.
"""
END = "python eval.py RUN means python eval.py score RUN. Each report has its own options:"


def all_help() -> str:
    """What eval.py --help prints: an example of each report."""
    examples = [f"  python eval.py {each.example:<40} {each.shows}" for each in REPORTS.values()]
    return "\n".join([INTRODUCTION, *examples, "", f"{END} python eval.py positions --help"])


def models_by_size() -> dict[str, list[str]]:
    """{size that can change after training: the models that have it}, as their presets say."""
    models: dict[str, list[str]] = {}
    for model in NAMES:
        for size in getattr(presets_of(model), "EVALUATION_SIZES", ()):
            models.setdefault(size, []).append(model)
    return models


def report_parser(name: str) -> OptionParser:
    """The parser of one report; it has only the options that the report uses."""
    report = REPORTS[name]
    example = f"python eval.py {report.example}"
    operands = example.partition(" -")[0].replace("RUN RUN", "RUN [RUN ...]")
    parser = OptionParser(
        prog=f"eval.py {name}",
        allow_abbrev=False,
        usage=f"{operands} [options]",
        description=f"{report.shows.capitalize()}.",
        epilog=f"example: {example}",
    )
    runs = "a folder that train.py or eval.py export wrote, or a published decoder"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)

    options = list(report.options)
    if report.splits:
        options += READING
    options += OPENING
    for word, how in options:
        parser.add_argument(word, **how)
    if report.sizes:
        add_sizes(parser, report.model)
    if report.splits:
        for size in RECALL_SIZES:
            text = f"of --data recall: {field_help(RecallConfig)[size]} (default as trained)"
            how = conversion(getattr(RecallConfig, size))
            parser.add_argument(f"--recall-{size}", help=text, **how)
        add_data_dir(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def add_sizes(parser: OptionParser, only: str | None) -> None:
    """Add an option for each size that can change after training, of all models or of one only."""
    for size, models in models_by_size().items():
        if only is None or only in models:
            configs = {model: presets_of(model).Config for model in models}
            texts = [f"{model}: {field_help(config)[size]}" for model, config in configs.items()]
            text = f"{'; '.join(texts)} (default the run's)"
            how = conversion(getattr(configs[models[0]], size))
            parser.add_argument(option_name(size), help=text, **how)


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """Return (name of the report, its options) of a command line.

    Raises InputError for what no run can do.
    """
    if argv[:1] in (["-h"], ["--help"]):
        print(all_help())
        raise SystemExit
    name, rest = split_name(argv)
    options = report_parser(name).parse(rest)
    if len(options.runs) > 1 and not REPORTS[name].several:
        several = " and ".join(name for name, report in REPORTS.items() if report.several)
        raise InputError(
            f"{len(options.runs)} runs were given; only eval.py {several} takes more than one"
        )
    check_options(options)
    return name, options


def split_name(argv: list[str]) -> tuple[str, list[str]]:
    """(The name of the report, the other words) of a command line; without a name it is score.

    Raises InputError if the first word is neither a report's name nor a run.
    """
    first = argv[0] if argv else ""
    if first in REPORTS:
        return first, argv[1:]
    is_run = Path(first).exists()
    if "/" in first and not is_run:
        raise InputError(f"no run at {first}; give a folder that train.py wrote with --out")
    if first and not is_run and not first.startswith("-"):
        check_choice("this is no run's folder, and the report", first, REPORTS, InputError)
    return "score", argv


def check_options(options: argparse.Namespace) -> None:
    """Raise InputError if the data, or a file to write, cannot be used; paths become absolute."""
    if getattr(options, "data", None):
        make_absolute(vars(options))  # as a run has it
        check_data(DataConfig(options.data))
    if getattr(options, "plot", None):
        check_figure(options.plot)
    if getattr(options, "out", None):
        out = Path(options.out)
        if out.is_symlink() or out.exists():
            raise InputError(f"--out {out} exists, and nothing is overwritten; give another --out")
        check_writable(out, "give another --out")
