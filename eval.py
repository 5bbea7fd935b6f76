"""Evaluate a trained run, or continue a text with it: python eval.py --help."""

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
from pathlib import Path

import torch

from accelerated.data.corpus import check_data, default_data_dir, load_corpus
from accelerated.data.lanes import longest_document
from accelerated.data.named_sets import words_of_split
from accelerated.data.recall import CHANCE
from accelerated.data.tokenizers import run_tokenizer
from accelerated.data.windows import SPLITS, lengths_of, overlap_of
from accelerated.errors import InputError, option_name, run_program
from accelerated.evaluation.dynamic import evaluate_dynamically
from accelerated.evaluation.frequency import by_frequency, distinct_words, draw_frequency, frequency_lines, word_counts
from accelerated.evaluation.generation import Sampling, continue_in_new_window, continue_text, show_text, stream_text
from accelerated.evaluation.memories import attention_by_bucket, bucket_records, bucket_table, compression_by_layer
from accelerated.evaluation.overlap import differences, overlap_record, overlap_row, overlap_table
from accelerated.evaluation.positions import by_position, draw_positions, position_lines
from accelerated.evaluation.score import as_record, carries_nothing, evaluate, finite, token_nats
from accelerated.evaluation.temporal_range import temporal_range
from accelerated.models import MODELS
from accelerated.training.checkpoint import chosen_checkpoint, load_checkpoint, load_parameters
from accelerated.training.log import check_figure
from accelerated.training.optimization import make_optimizer, set_learning_rate
from accelerated.training.options import OptionParser, add_data_dir, changed
from accelerated.training.process import autocast, choose_device
from accelerated.training.settings import DEVICES, GPT2_MODEL, settings_from
from reference.pretrained_recurrence import POOLS

MEMORIES = ("memory", "compressed_memory")  # sizes that may differ between training and evaluation
OWNERS = dict.fromkeys((*MEMORIES, "attention_buckets", "compression_by_layer"), "compressive")
OWNERS |= dict.fromkeys(("segment", "pool", "overlap", "new_window"), GPT2_MODEL)
INSTEAD = (  # of the plain evaluation
    "sample", "overlap", "temporal_range", "attention_buckets", "compression_by_layer", "by_position", "by_frequency",
    "dynamic_evaluation",
)  # fmt: skip
OF_SAMPLES = ("prompt", "prompt_file", "temperature", "top_k", "top_p", "seed", "new_window")


def options_parser():
    parser = OptionParser(
        prog="eval.py", allow_abbrev=False,
        description="Read documents with a trained model, its state carried through each, and report what it predicted; "
        "or continue a text.",
    )  # fmt: skip
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder that train.py wrote; with --overlap one or more of them")
    parser.add_argument(
        "--checkpoint", default="last", metavar="NAME", help="which of a run's checkpoints: last, best or step-N (default last)"
    )
    parser.add_argument("--data", help="what to read: all that train.py's --data takes (default what the run trained on)")
    add_data_dir(parser)
    parser.add_argument("--split", choices=SPLITS, help="which part of it (default valid; with --overlap valid and test)")
    parser.add_argument("--batch", type=int, help="lanes read at a time (default the run's)")
    parser.add_argument(
        "--clear-memory", action="store_true", help="start every segment from the initial state instead of the carried one"
    )
    parser.add_argument(
        "--temporal-range", type=int, metavar="K",
        help="instead of evaluating, clear the memory every K segments and print the loss by how many segments it has carried",
    )  # fmt: skip
    add_model_options(parser)
    parser.add_argument(
        "--attention-buckets", action="store_true",
        help="instead of evaluating, print how much attention goes to six ages each of compressed memory, memory and segment",
    )  # fmt: skip
    parser.add_argument(
        "--compression-by-layer", action="store_true",
        help="instead of evaluating, print the attention-reconstruction loss of every layer",
    )  # fmt: skip
    parser.add_argument(
        "--sequences", type=int, metavar="N", help="segments that the two options above average over (default 1000)"
    )
    parser.add_argument(
        "--by-position", action="store_true",
        help="instead of evaluating once, print the loss by the position in the document, with the memory and with it cleared: "
        "does it keep falling past what attention reaches?",
    )  # fmt: skip
    parser.add_argument(
        "--by-frequency", action="store_true",
        help="instead of evaluating, print the perplexity of words by how often they stand in the run's training split "
        "(Compressive Transformers, Table 7)",
    )  # fmt: skip
    parser.add_argument(
        "--dynamic-evaluation", type=float, metavar="RATE",
        help="also evaluate while going on training on what was scored, with the run's optimiser at this learning rate "
        "(a tenth of the run's own is a start)",
    )  # fmt: skip
    parser.add_argument(
        "--plot", metavar="FILE", help="draw --by-position or --by-frequency too: .png, .pdf or .svg (extra plot)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_sample_options(parser)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU where there is one (default auto)")
    return parser


def add_model_options(parser):
    """Sizes at which a model may be read other than it was trained."""
    for name in MEMORIES:
        help_text = f"rows of {name.replace('_', ' ')} in each layer of a compressive model, 0 for none (default the run's)"
        parser.add_argument(option_name(name), type=int, metavar="INT", help=help_text)
    parser.add_argument(
        "--overlap", type=overlaps, metavar="O,...",
        help="instead of evaluating once, print a table over these overlaps of a pretrained_recurrence model's windows, each "
        "from 0 to one less than the window; or at each run's own: --overlap own",
    )  # fmt: skip
    parser.add_argument("--segment", type=int, metavar="T", help="window of a pretrained_recurrence model (default the run's)")
    parser.add_argument(
        "--pool", choices=POOLS, help="positions that a pretrained_recurrence model pools in a window (default the run's)"
    )


def add_sample_options(parser):
    """Those of continuing a text."""
    parser.add_argument(
        "--sample", type=int, metavar="N", help="instead of evaluating, continue a prompt by N tokens, shown as they come"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default a line break)")
    parser.add_argument("--prompt-file", metavar="FILE", help="a file to continue, of any length")
    parser.add_argument(
        "--new-window", action="store_true",
        help="continue in a new window that begins with the prompt's last token and knows the rest by the inserted vector alone "
        "(pretrained_recurrence, section 5.3; the paper takes --temperature 0)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, help="of sampling: below 1 favours probable tokens; 0 takes the most probable (default 0.8)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most probable tokens (default all)")
    parser.add_argument(
        "--top-p", type=float, metavar="P",
        help="nucleus sampling: from the fewest tokens that have probability P together; 0.98 is the Compressive Transformer's "
        "(default 1: all)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="of sampling (default 0)")


def overlaps(text):
    """'0,5,10' -> (0, 5, 10); 'own' as it is."""
    if text == "own":
        return text
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give overlaps joined by commas, like 0,5,10, or own") from None


def was_given(options, name):
    """Whether the command line has it: 0 is a value too."""
    return getattr(options, name) is not None and getattr(options, name) is not False


def parse_options(argv):
    options = options_parser().parse(argv)
    options.data_dir = Path(options.data_dir or default_data_dir())
    if options.sample is None and any(was_given(options, name) for name in OF_SAMPLES):
        raise InputError(f"{', '.join(map(option_name, OF_SAMPLES))} go with --sample N; add it or leave them out")
    unread = [name for name in ("data", "split", "batch", "clear_memory") if was_given(options, name)]
    if options.sample is not None and unread:
        raise InputError(f"--sample reads --prompt and no documents; leave {option_name(unread[0])} out")
    given = [name for name in INSTEAD if was_given(options, name)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(map(option_name, given))} each replace the evaluation; give one of them")
    if options.clear_memory and given and given != ["overlap"]:
        raise InputError(f"--clear-memory leaves {option_name(given[0])} nothing to look into; leave one of them out")
    if len(options.runs) > 1 and options.overlap is None:
        raise InputError(f"{len(options.runs)} runs were given; only --overlap takes more than one")
    if options.sequences is not None and not (options.attention_buckets or options.compression_by_layer):
        raise InputError("--sequences goes with --attention-buckets or --compression-by-layer; add one or leave it out")
    if options.plot and not (options.by_position or options.by_frequency):
        raise InputError("--plot goes with --by-position or --by-frequency; add one or leave it out")
    check_values(options)
    return options


def check_values(options):
    """Raise InputError for a value that is impossible whatever the run."""
    least = {"batch": 1, "sample": 1, "sequences": 2, "temporal_range": 2, "temperature": 0, "seed": 0, "top_k": 1}
    for name, low in least.items():
        if getattr(options, name) is not None and not low <= getattr(options, name) < math.inf:
            raise InputError(f"{option_name(name)} is {getattr(options, name)}; it must be at least {low}")
    if options.temperature and options.temperature < 0.001:
        raise InputError(f"--temperature is {options.temperature}; give 0 for the most probable token, or at least 0.001")
    if options.temperature == 0 and (options.top_k or options.top_p):
        raise InputError("--temperature 0 takes the most probable token; leave --top-k and --top-p out")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise InputError(f"--top-p is {options.top_p}; it must be above 0 and at most 1")
    if options.dynamic_evaluation is not None and not 0 < options.dynamic_evaluation < math.inf:
        raise InputError(f"--dynamic-evaluation is {options.dynamic_evaluation}; it must be a positive learning rate")
    if options.prompt == "":
        raise InputError("--prompt is empty; give at least one character to continue")
    if options.prompt is not None and options.prompt_file is not None:
        raise InputError("--prompt and --prompt-file each say what to continue; give one of them")
    if options.data:
        check_data(options.data)
    if options.plot:
        check_figure(options.plot)


def evaluation_config(options, settings):
    """The model's config with the memory sizes and the compression loss that the options ask for."""
    asked = [name for name in OWNERS if was_given(options, name)]
    for name in asked:
        if OWNERS[name] != settings.model:
            raise InputError(f"{option_name(name)} is for {OWNERS[name]} models, this is {settings.model}; leave it out")
    changes = {name: getattr(options, name) for name in asked if name in (*MEMORIES, "segment", "pool")}
    if settings.model == GPT2_MODEL and options.overlap not in (None, "own"):
        changes["overlap"] = 0  # the run's own is not wanted
    elif options.segment is not None and 0 < options.segment <= settings.model_config.overlap:
        raise InputError(
            f"--segment {options.segment} is no longer than the run's overlap {settings.model_config.overlap}; give --overlap"
        )
    if settings.model != "compressive":
        return changed(settings.model_config, changes)
    if options.compression_by_layer:
        changes["compression_loss"] = "attention_reconstruction"
    config = changed(settings.model_config, changes)
    learned = config.compression in ("conv", "dilated_conv") or config.compression_loss == "auto_encoding"
    if learned and config.compressed_memory and not settings.model_config.compressed_memory:
        raise InputError(
            f"--compressed-memory {config.compressed_memory}: this run was trained with compressed_memory 0 and has learned no "
            f"compression to fill it with; leave the option out, or train with --compressed-memory"
        )
    if options.compression_by_layer and not config.compressed_memory:
        raise InputError("--compression-by-layer: compressed_memory is 0, so nothing is compressed; leave the option out")
    return config


def load_run(run, options, device):
    """The trained model, ready to evaluate, its Settings, and the checkpoint's contents."""
    path = chosen_checkpoint(run, options.checkpoint)
    contents = load_checkpoint(path, device)
    settings = settings_from(contents, path)
    torch.set_default_dtype(torch.float64 if settings.training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](evaluation_config(options, settings)).to(device)
    load_parameters(model, contents["parameters"], path, unused=".compression.")
    return model.eval(), settings, contents


def memory_line(model, settings):
    """How the model is evaluated, where that is not how it was trained; otherwise None."""
    if settings.model == GPT2_MODEL:
        notes = differences(model.config, settings.model_config)
        return f"trained with {', '.join(notes)}" if notes else None
    if settings.model != "compressive":
        return None
    now, then = (", ".join(f"{name} {getattr(c, name)}" for name in MEMORIES) for c in (model.config, settings.model_config))
    return None if now == then else f"evaluated with {now}; trained with {then}"


def inspect(model, documents, lanes, options):
    """Attention by age or compression loss by layer, over segments whose memories are full: (record, lines)."""
    sequences = options.sequences or 1000
    with torch.autocast(next(model.parameters()).device.type, enabled=False):  # small differences need all their digits
        if options.attention_buckets:
            weights = attention_by_bucket(model, documents, lanes, sequences)
            return {"attention": bucket_records(weights)}, bucket_table(weights)
        losses = compression_by_layer(model, documents, lanes, sequences).tolist()
    lines = [f"layer {layer:<3} attention-reconstruction loss {loss:.3e}" for layer, loss in enumerate(losses, start=1)]
    return {"attention_reconstruction_loss": losses}, lines


def measure_temporal_range(model, documents, tokenizer, lanes, reach):
    """The loss by how many segments the memory has carried: (record, lines)."""
    if carries_nothing(model):
        raise InputError(f"--temporal-range {reach}: this model carries no memory; leave the option out")
    longest = longest_document(documents, model.config.segment, overlap_of(model.config))
    scores = temporal_range(model, documents, tokenizer, lanes, reach) if longest >= 2 * reach else []
    if not scores or not all(score.tokens for score in scores):
        raise InputError(
            f"--temporal-range {reach}: no document scores anything in its segments {reach + 1} to {2 * reach}; "
            f"give longer documents (--data) or a smaller number"
        )
    lines = ["segments carried   bits per byte   right predictions   tokens scored"]
    for carried, score in enumerate(scores):
        lines.append(f"{carried:16d}   {score.bits_per_byte:13.4f}   {score.accuracy:17.1%}   {score.tokens:13d}")
    return {"temporal_range": [{"segments": n} | score_record(score) for n, score in enumerate(scores)]}, lines


def measure_positions(model, documents, tokenizer, lanes, plot):
    """The loss by position in the document, with the memory and with it cleared: (record, lines)."""
    readings = {}
    for label, clear in (("memory carried", False), ("cleared", True)):
        if clear and carries_nothing(model):
            continue
        nats = token_nats(model, documents, tokenizer, lanes, clear_memory=clear)
        readings[label] = by_position(nats, documents, tokenizer, model.config.segment)
    if plot:
        draw_positions(plot, readings, model.attention_reach)
    record = {label.replace(" ", "_"): [as_record(row) for row in rows] for label, rows in readings.items()}
    reach = f"attention reaches {model.attention_reach:,} tokens back"
    return {"by_position": record, "attention_reach": model.attention_reach}, [*position_lines(readings), reach]


def measure_frequencies(model, documents, training, tokenizer, lanes, plot):
    """Perplexity per word by how often the word stands in the training documents: (record, lines)."""
    words = distinct_words(documents, tokenizer)
    rows = by_frequency(
        token_nats(model, documents, tokenizer, lanes), documents, word_counts(training, words, tokenizer), tokenizer
    )
    if plot:
        draw_frequency(plot, rows)
    return {"by_frequency": [as_record(row) for row in rows]}, frequency_lines(rows)


def measure_dynamically(model, documents, tokenizer, lanes, settings, contents, rate, words):
    """The score with the weights as they are, and with weights that go on learning from what was scored: (record, lines)."""
    optimizer = make_optimizer(model, settings.training)
    try:
        optimizer.load_state_dict(contents["optimizer"])
    except ValueError:
        raise InputError(
            "--dynamic-evaluation goes on with the run's optimiser, which has other parameters; leave sizes out"
        ) from None
    set_learning_rate(optimizer, rate)
    static = evaluate(model, documents, tokenizer, lanes)
    dynamic = evaluate_dynamically(model, documents, tokenizer, lanes, optimizer, settings.training.clip)
    lines = ["with the weights as they are:", *score_lines(static, words), f"with dynamic evaluation at {rate:g}:"]
    return {"static": score_record(static, words), "dynamic": score_record(dynamic, words)}, lines + score_lines(dynamic, words)


def prompt_text(options):
    """The bytes to continue."""
    if options.prompt_file is None:
        return os.fsencode(options.prompt or "\n")  # what was typed, be it UTF-8 or not
    try:
        text = Path(options.prompt_file).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read --prompt-file {options.prompt_file}: {error.strerror}") from None
    if not text:
        raise InputError(f"--prompt-file {options.prompt_file} is empty; give at least one character to continue")
    return text


def print_sample(model, tokenizer, options, device):
    """Print the prompt and, as it comes, its continuation; with --json both at the end."""
    ids = tokenizer.encode(prompt_text(options)).astype("int64")
    prompt = torch.tensor(ids, device=device)[None]
    generator = torch.Generator(device).manual_seed(options.seed or 0)
    temperature = 0.8 if options.temperature is None else options.temperature
    sampling = Sampling(temperature, options.top_k or 0, options.top_p or 1.0)
    go_on = continue_in_new_window if options.new_window else continue_text
    tokens = go_on(model, prompt, options.sample, sampling, generator)
    if options.json:
        continuation = [token.item() for token in tokens]
        print(json.dumps({"prompt": show_text(tokenizer, ids), "continuation": show_text(tokenizer, continuation)}))
        return
    stream_text(tokenizer, itertools.chain(ids, tokens), lambda text: print(text, end="", flush=True))
    print()


def load_documents(options, settings, tokenizer, digest=None, usual=("valid",)):
    """(what was read, {split: documents}) of --split or else the usual ones; InputError where one has nothing to predict.

    digest is that of the tokens that the run was trained on.
    """
    data = options.data or settings.data.data
    if data == "recall" and tokenizer.name != "bytes":
        raise InputError(f"--data recall is made of bytes, the run's tokenizer is {tokenizer.name}; give other --data")
    splits, found = load_corpus(data, tokenizer, settings.recall, options.data_dir)
    if data == settings.data.data and digest not in (None, found):
        print(f"warning: {data} is no longer what the run was trained on; its splits may be others", file=sys.stderr)
    splits = {split: splits[split] for split in ((options.split,) if options.split else usual)}
    for split, documents in splits.items():
        if not lengths_of(documents).any():
            raise InputError(f"--split {split} of {data} has nothing to predict; choose another split")
    return data, splits


def measure_overlaps(options, device):
    """The table of all runs at the overlaps asked for: (record, lines)."""
    runs, rows = [], []
    for run in dict.fromkeys(options.runs):
        model, settings, _ = load_run(run, options, device)
        wanted = (settings.model_config.overlap,) if options.overlap == "own" else dict.fromkeys(options.overlap)
        runs.append((run, model, settings, [changed(model.config, {"overlap": overlap}) for overlap in wanted]))
    sources = list(dict.fromkeys(options.data or settings.data.data for _, _, settings, _ in runs))
    if len(sources) > 1:
        raise InputError(f"the runs read different data ({', '.join(sources)}); say with --data what all are to read")
    read = {}  # runs that share tokenizer and recall task share their documents
    for run, model, settings, configs in runs:
        key = (run if settings.data.own_ranks else settings.data.tokenizer, settings.recall)
        if key not in read:
            tokenizer = run_tokenizer(run, settings.data)
            read[key] = (tokenizer, load_documents(options, settings, tokenizer, usual=("valid", "test"))[1])
        tokenizer, splits = read[key]
        words = {split: words_of_split(sources[0], split, documents) for split, documents in splits.items()}
        counts = {split: count for split, (count, _) in words.items()}
        for config in configs:
            model.config = config
            with autocast(settings.training.dtype, device):
                lanes = options.batch or settings.training.batch
                rows.append(
                    overlap_row(run, model, settings.model_config, splits, counts, tokenizer, lanes, options.clear_memory)
                )
    title = f"{sources[0]}, words of the original text: " + ", ".join(f"{s} {n:,} ({how})" for s, (n, how) in words.items())
    return {"data": sources[0], "rows": [overlap_record(row) for row in rows]}, [title, *overlap_table(rows)]


def score_record(score, words=(0, "")):
    """A Score as plain values."""
    record = {"bits_per_byte": score.bits_per_byte, "bits_per_token": score.bits_per_token,
              "perplexity": score.perplexity(score.tokens)}  # fmt: skip
    if words[0]:
        record |= {"word_perplexity": score.perplexity(words[0]), "words": words[0], "words_are": words[1]}
    record |= {"nats": score.nats, "tokens": score.tokens, "text_bytes": score.text_bytes, "accuracy": score.accuracy}
    return {name: value if isinstance(value, str) else finite(value) for name, value in record.items()}


def score_lines(score, words, data=None):
    """Lines of what a split adds up to."""
    lines = [
        f"bits per byte       {score.bits_per_byte:.4f}", f"bits per token      {score.bits_per_token:.4f}",
        f"perplexity          {score.perplexity(score.tokens):.3f}",
    ]  # fmt: skip
    if words[0]:
        lines.append(f"per word            {score.perplexity(words[0]):.5g} ({words[0]} words of the original text, {words[1]})")
    lines += [f"log-probability     {-score.nats:.2f} nats", f"tokens scored       {score.tokens}"]
    return [*lines, f"right answers       {score.accuracy:.1%} (chance {CHANCE:.0%})"] if data == "recall" else lines


def measure(model, tokenizer, settings, contents, options):
    """What was asked for of one run: (record, lines)."""
    data, splits = load_documents(options, settings, tokenizer, contents.get("corpus"))
    [(split, documents)], lanes = splits.items(), options.batch or settings.training.batch
    words = words_of_split(data, split, documents)
    if options.attention_buckets or options.compression_by_layer:
        record, lines = inspect(model, documents, lanes, options)
    elif options.temporal_range is not None:
        record, lines = measure_temporal_range(model, documents, tokenizer, lanes, options.temporal_range)
    elif options.by_position:
        record, lines = measure_positions(model, documents, tokenizer, lanes, options.plot)
    elif options.by_frequency:
        if not words[0]:
            raise InputError(f"--by-frequency: {data} has no words; leave the option out, or give other --data")
        training = load_corpus(settings.data.data, tokenizer, settings.recall, options.data_dir).splits["train"]
        record, lines = measure_frequencies(model, documents, training, tokenizer, lanes, options.plot)
    elif options.dynamic_evaluation is not None:
        record, lines = measure_dynamically(
            model, documents, tokenizer, lanes, settings, contents, options.dynamic_evaluation, words
        )
    else:
        score = evaluate(model, documents, tokenizer, lanes, clear_memory=options.clear_memory)
        record, lines = score_record(score, words), score_lines(score, words, data)
    memory = "memory cleared at every segment" if options.clear_memory else "memory carried through each document"
    memory = "no memory" if carries_nothing(model) else memory
    notes = [model.describe(), *([line] if (line := memory_line(model, settings)) else [])]
    title = f"{settings.model} from {Path(options.runs[0])}, step {contents['step']}, {split} split of {data}, {memory}"
    about = {"run": str(options.runs[0]), "model": settings.model, "step": contents["step"]}
    about |= {"config": dataclasses.asdict(model.config), "data": data, "split": split, "memory_cleared": options.clear_memory}
    return about | record, [*notes, title, *lines]


def main(argv):
    options = parse_options(argv)
    device = choose_device(options.device)
    if options.overlap is not None:
        record, lines = measure_overlaps(options, device)
    else:
        model, settings, contents = load_run(options.runs[0], options, device)
        tokenizer = run_tokenizer(options.runs[0], settings.data)
        with autocast(settings.training.dtype, device):
            if options.sample is not None:
                print_sample(model, tokenizer, options, device)
                return
            record, lines = measure(model, tokenizer, settings, contents, options)
    print(json.dumps(record) if options.json else "\n".join(lines))


if __name__ == "__main__":
    run_program("eval.py", main)
