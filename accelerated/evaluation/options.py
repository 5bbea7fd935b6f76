"""The command line of eval.py: its reports and their options. It imports no torch, so a typo and --help are answered at once."""

import argparse
import difflib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from accelerated.data.config import DataConfig, check_data
from accelerated.data.sources import RECORDING, read_errors
from accelerated.data.windows import SPLITS
from accelerated.program.errors import InputError, option_name
from accelerated.program.files import check_writable
from accelerated.program.recordings import read_recording
from accelerated.training.log import check_figure
from accelerated.training.options import OptionParser, add_data_dir, make_absolute
from accelerated.training.settings import DEVICES, GPT2_MODEL
from reference.pretrained_recurrence import POOLS


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


def overlaps(text: str) -> tuple[int, ...] | None:
    """'0,5,10' -> (0, 5, 10), each once; 'own' -> None."""
    try:
        return None if text == "own" else tuple(dict.fromkeys(int(number) for number in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers separated by commas, like 0,5,10, or own") from None


def state_fields(text: str) -> tuple[str, ...]:
    """'states,keys' -> ('states', 'keys'); the model decides which names its state has."""
    if not all(name.isidentifier() for name in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; give RUN first, then names of the state's fields, joined by commas")
    return tuple(text.split(","))


def prompt_in_file(path: str) -> bytes | tuple[bytes, int]:
    """The bytes of the file that --prompt-file names; of a recording (its mu-law values, samples per second)."""
    with read_errors(f"--prompt-file {path}"):
        return read_recording(path) if path.lower().endswith(RECORDING) else Path(path).read_bytes()


def add_sampling(parser: OptionParser) -> None:
    """Add the options of sample."""
    parser.add_argument("--tokens", type=at_least(1), default=200, metavar="N", help="how many tokens to add (default 200)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", type=os.fsencode, metavar="TEXT", default=b"\n", help="text to continue (default a newline)")
    text = "file with the text to continue, of any length; for a run that reads recordings a .wav"
    file = {"type": prompt_in_file, "metavar": "FILE", "help": text}
    prompts.add_argument("--prompt-file", dest="prompt", default=argparse.SUPPRESS, **file)
    fits = number(float, lambda t: t == 0 or 0.001 <= t < math.inf, "0 for the most probable token, or at least 0.001")
    text = "below 1 favours probable tokens; 0 takes the most probable (default 0.8)"
    parser.add_argument("--temperature", type=fits, default=0.8, help=text)
    parser.add_argument("--top-k", type=at_least(1), metavar="K", help="sample from the K most probable tokens (default all)")
    fits = number(float, lambda p: 0 < p <= 1, "above 0 and at most 1")
    text = "sample from the fewest tokens with total probability P; the Compressive Transformer paper uses 0.98 (default 1: all)"
    parser.add_argument("--top-p", type=fits, metavar="P", help=text)
    fits = number(int, lambda seed: 0 <= seed < 2**63, "at least 0 and below 2^63")
    parser.add_argument("--seed", type=fits, default=0, help="seed of the random numbers (default 0)")
    text = (
        "continue in a new window that begins with the prompt's last token and sees the rest only through the inserted vectors "
        "(pretrained_recurrence, section 5.3; the paper uses --temperature 0)"
    )
    parser.add_argument("--new-window", action="store_true", default=None, help=text)
    text = "the .wav to write, prompt and continuation, for a run that reads recordings; nothing is overwritten"
    parser.add_argument("--out", metavar="FILE", help=text)


def add_overlaps(parser: OptionParser) -> None:
    """Add the options of overlap."""
    text = "how many tokens a window shares with the previous one: numbers below the window (default own: each run's)"
    parser.add_argument("--overlaps", type=overlaps, metavar="O,...", help=text)


def add_range(parser: OptionParser) -> None:
    """Add the options of range."""
    parser.add_argument("--segments", type=at_least(2), metavar="K", required=True, help="clear it every K segments (required)")


def add_sequences(parser: OptionParser) -> None:
    """Add the options of attention and compression."""
    text = "segments to average over (default 1000)"
    parser.add_argument("--sequences", type=at_least(2), default=1000, metavar="N", help=text)


def add_contexts(parser: OptionParser) -> None:
    """Add the options of topics."""
    text = "how many contexts of a window to continue (default 1000; the paper 8000)"
    parser.add_argument("--contexts", type=at_least(2), default=1000, metavar="N", help=text)
    text = "how many tokens to continue each by (default 30, the paper's)"
    parser.add_argument("--tokens", type=at_least(1), default=30, metavar="N", help=text)
    text = "seed of the contexts and the topic model (default 0): runs with the same one are compared on the same"
    seed = number(int, lambda seed: 0 <= seed < 1 << 32, "at least 0 and below 2^32")  # as scikit-learn takes it
    parser.add_argument("--seed", type=seed, default=0, help=text)


def add_learning_rate(parser: OptionParser) -> None:
    """Add the options of dynamic."""
    rate = number(float, lambda rate: 0 < rate < math.inf, "positive and finite")
    text = "constant learning rate of the run's optimiser (required); try a tenth of the run's own first"
    parser.add_argument("--learning-rate", type=rate, metavar="RATE", required=True, help=text)


def add_folder(parser: OptionParser) -> None:
    """Add the argument of export."""
    parser.add_argument("folder", metavar="FOLDER", help="where to write it; a folder that does not exist yet, or is empty")


def add_page(parser: OptionParser) -> None:
    """Add the options of view."""
    parser.add_argument("--out", metavar="FILE", required=True, help="the page to write; nothing is overwritten (required)")
    parser.add_argument("--document", type=at_least(1), metavar="N", help="which document of the split (default the longest)")
    parser.add_argument("--from", dest="first", type=at_least(1), default=1, metavar="S", help="the first segment to show")
    text = "how many segments to show (default those of about 16,384 tokens)"
    parser.add_argument("--segments", type=at_least(1), metavar="K", help=text)


def add_axis(parser: OptionParser) -> None:
    """Add the options of curves."""
    text = "what the curves are drawn against (default steps)"
    parser.add_argument("--against", choices=("steps", "tokens"), default="steps", help=text)


def check_new(path: str) -> None:
    """Raise InputError unless a new file can be written to path."""
    path = Path(path)
    if os.path.lexists(path):
        raise InputError(f"--out {path} exists, and nothing is overwritten; give another --out")
    check_writable(path, "give another --out")


class Report(NamedTuple):
    """A subcommand of eval.py; eval.py's FUNCTIONS compute it."""

    help: str  # one line
    example: str  # example arguments
    add_options: Callable = lambda parser: None
    model: str | None = None  # the only model that has this report
    splits: tuple[str, ...] = ("valid",)  # read if --split is not given
    clears: bool = False  # whether it takes --clear-memory
    plots: bool = False  # whether it takes --plot
    several: bool = False  # whether it makes one table of several runs
    exact: bool = False  # whether bfloat16 is off, because small differences matter
    sizes: bool = True  # whether it can evaluate with other sizes than those of training
    text: bool = False  # whether it is about text, not recordings
    opens: bool = True  # whether it needs the runs' models, not their logs alone


REPORTS = {
    "score": Report("bits per byte, perplexity and log-probability of a split", "RUN --split test", clears=True),
    "sample": Report("a continuation of a text, or of a recording", "RUN --prompt 'def ' --top-p 0.98", add_sampling, splits=()),
    "positions": Report(
        "the loss by the position in the document, with the memory and with it cleared", "RUN --plot positions.png", plots=True
    ),
    "frequency": Report(
        "the perplexity of words by how often they occur in the training split", "RUN --plot frequency.png", plots=True,
        text=True,
    ),
    "overlap": Report(
        "a table of pretrained_recurrence runs at several overlaps of their windows", "RUN RUN --overlaps 0,5", add_overlaps,
        model=GPT2_MODEL, splits=("valid", "test"), clears=True, several=True,
    ),
    "range": Report("the loss by how many segments the memory has carried", "RUN --segments 8", add_range),
    "attention": Report(
        "how much attention goes to each age of a compressive model's memories", "RUN --sequences 200", add_sequences,
        model="compressive", exact=True,
    ),
    "compression": Report(
        "the attention-reconstruction loss of each layer of a compressive model", "RUN --sequences 200", add_sequences,
        model="compressive", exact=True,
    ),
    "topics": Report(
        "how near the topics of greedy continuations are to those of their contexts", "RUN --contexts 1000", add_contexts,
        model=GPT2_MODEL, sizes=False, text=True,
    ),
    "dynamic": Report(
        "the score when training continues on the text that is scored", "RUN --learning-rate 2e-4", add_learning_rate,
        exact=True,  # bfloat16 would round small steps away
    ),
    "export": Report(
        "a run as safetensors, settings, tokenizer and model card, for other programs and for --init", "RUN FOLDER", add_folder,
        splits=(), exact=True, sizes=False,
    ),
    "view": Report(
        "a page that shows token by token what the carried memory changed", "RUN --out page.html", add_page, sizes=False,
        text=True,
    ),
    "curves": Report(
        "the last and best losses of runs, finished or not, and their curves in one plot", "RUN RUN --plot curves.png", add_axis,
        splits=(), plots=True, several=True, sizes=False, opens=False,
    ),
}  # fmt: skip


def overview() -> str:
    """The text of eval.py --help."""
    rows = [(f"python eval.py {name} {report.example}", report.help) for name, report in REPORTS.items()]
    lines = "\n".join(f"  {example:<55} {text}" for example, text in rows)
    return f"""Evaluate a trained model on documents, with its state carried through each of them; or continue a text.
RUN is a folder that train.py wrote.

{lines}

python eval.py RUN means python eval.py score RUN. Each report has its own options: python eval.py positions --help"""


def report_parser(name: str) -> OptionParser:
    """The parser of one report; it has only the options that the report uses."""
    report = REPORTS[name]
    folder = " FOLDER" if report.add_options is add_folder else ""
    usage = f"python eval.py {name} RUN{' [RUN ...]' if report.several else ''}{folder} [options]"
    about = {
        "description": f"{'Write' if report.add_options in (add_folder, add_page) else 'Print'} {report.help}.",
        "epilog": f"example: python eval.py {name} {report.example}",
    }
    parser = OptionParser(prog=f"eval.py {name}", allow_abbrev=False, usage=usage, **about)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder that train.py wrote")
    report.add_options(parser)
    if report.clears:
        text = "start every segment from the initial state; with names of its fields clear only these, and carry the others"
        how = {"nargs": "?", "const": True, "default": False, "type": state_fields, "metavar": "FIELD,..."}
        parser.add_argument("--clear-memory", **how, help=text)
    if report.plots:
        parser.add_argument("--plot", metavar="FILE", help="draw it too: .png, .pdf or .svg (needs the extra plot)")
    if report.splits:
        add_reading(parser, report.splits)
    if report.sizes and report.model != GPT2_MODEL:
        own = "rows of memory in each layer of a compressive model, or in a memorizing one; 0 for none (default the run's)"
        compressed = "rows of compressed memory in each layer of a compressive model, 0 for none (default the run's)"
        for size, text in (("memory", own), ("compressed_memory", compressed)):
            parser.add_argument(option_name(size), type=int, metavar="ROWS", help=text)
    if report.sizes and report.model != "compressive":
        whose = "of a pretrained_recurrence model (default the run's)"
        parser.add_argument("--segment", type=int, metavar="T", help=f"window length {whose}")
        parser.add_argument("--pool", choices=POOLS, help=f"positions that are pooled in a window {whose}")
    if report.opens:
        text = "checkpoint: last, best or step-N (default last)"
        parser.add_argument("--checkpoint", default="last", metavar="NAME", help=text)
        parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU if there is one (default auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def add_reading(parser: OptionParser, splits: tuple[str, ...]) -> None:
    """Add the options of a report that reads documents: which ones, and how."""
    parser.add_argument("--data", help="what to read, as for train.py's --data (default: what the run was trained on)")
    add_data_dir(parser)
    parser.add_argument("--split", choices=SPLITS, help=f"which split of it (default {' and '.join(splits)})")
    text = "of --data recall: tokens between the facts and the first question (default as trained)"
    parser.add_argument("--recall-distance", type=at_least(0), metavar="N", help=text)
    parser.add_argument("--recall-pairs", type=at_least(1), metavar="N", help="of --data recall: facts (default as trained)")
    text = "carry memory from document to document; positions then count in all of a lane's text (default as trained)"
    parser.add_argument("--carry-over-documents", action=argparse.BooleanOptionalAction, help=text)
    parser.add_argument("--batch", type=at_least(1), metavar="B", help="lanes, documents read at a time (default the run's)")


def refuse_options_of_other_reports(name: str, words: list[str]) -> None:
    """Raise InputError for an option that only other reports have.

    The report's parser would refuse it too; this message also names the reports that have it.
    """
    known = {report: report_parser(report)._option_string_actions for report in REPORTS}
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        takers = [report for report, options in known.items() if option in options]
        if takers and name not in takers:
            raise InputError(f"{option} is an option of eval.py {', '.join(takers)}, not of {name}; leave it out")


def parse(argv: list[str]) -> tuple[str, argparse.Namespace]:
    """Return (name of the report, its options) of a command line; raises InputError for what no run can do."""
    if argv[:1] in (["-h"], ["--help"]):
        print(overview())
        raise SystemExit
    named = bool(argv) and argv[0] in REPORTS
    name, rest = (argv[0], argv[1:]) if named else ("score", argv)
    refuse_options_of_other_reports(name, rest)
    if not named and argv and not argv[0].startswith("-") and not Path(argv[0]).exists():
        nearest = difflib.get_close_matches(argv[0], REPORTS, n=1)
        advice = f"did you mean {nearest[0]}?" if nearest else f"the reports are {', '.join(REPORTS)}"
        raise InputError(f"{argv[0]} is neither a run's folder nor a report; {advice}")
    options = report_parser(name).parse(rest)
    if len(options.runs) > 1 and not REPORTS[name].several:
        several = " and ".join(name for name, report in REPORTS.items() if report.several)
        raise InputError(f"{len(options.runs)} runs were given; only eval.py {several} take more than one")
    if getattr(options, "data", None):
        make_absolute(vars(options))  # as a run has it
        check_data(DataConfig(options.data))
    if getattr(options, "plot", None):
        check_figure(options.plot)
    if name == "sample":
        check_sampling(options)
    if name == "view":
        check_new(options.out)
    return name, options


def check_sampling(options: argparse.Namespace) -> None:
    """Raise InputError for options of sample that do not fit together, and for an empty prompt."""
    if options.temperature == 0 and (options.top_k or options.top_p):
        raise InputError("--temperature 0 takes the most probable token; leave --top-k and --top-p out")
    if not (options.prompt if isinstance(options.prompt, bytes) else options.prompt[0]):
        raise InputError("the prompt is empty; give at least one character or sample to continue")
    if options.out:
        check_new(options.out)
