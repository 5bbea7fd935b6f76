"""Evaluate a trained run, or continue a text with it: python eval.py --help."""

import argparse
import os
from pathlib import Path

import torch

from accelerated.checkpoint import checkpoint_path, load_checkpoint, load_parameters
from accelerated.corpus import default_data_dir, load_corpus, longest_document
from accelerated.documents import SPLITS, count_words, lengths_of
from accelerated.errors import InputError, option_name, run_program
from accelerated.evaluation import carries_nothing, evaluate, temporal_range
from accelerated.generation import Sampling, continue_in_new_window, continue_text, show_text
from accelerated.inspection import attention_by_bucket, bucket_table, compression_by_layer
from accelerated.models import MODELS
from accelerated.overlap import differences, overlap_row, overlap_table
from accelerated.recall import CHANCE
from accelerated.settings import (
    DEVICES,
    GPT2_MODEL,
    OptionParser,
    add_data_dir,
    autocast,
    changed,
    choose_device,
    settings_from,
)
from accelerated.tokenizer import run_tokenizer
from accelerated.windows import overlap_of
from reference.pretrained_recurrence import POOLS

MEMORIES = ("memory", "compressed_memory")  # sizes that may differ between training and evaluation
OWNERS = dict.fromkeys((*MEMORIES, "attention_buckets", "compression_by_layer"), "compressive")
OWNERS |= dict.fromkeys(("segment", "pool", "overlap", "new_window"), GPT2_MODEL)
INSTEAD = ("sample", "overlap", "temporal_range", "attention_buckets", "compression_by_layer")  # of the plain evaluation


def options_parser():
    parser = OptionParser(
        prog="eval.py", allow_abbrev=False,
        description="Read documents with a trained model, its state carried through each, and report what it predicted; "
        "or continue a text.",
    )  # fmt: skip
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder that train.py wrote; with --overlap one or more of them")
    parser.add_argument("--data", help="what to read: stdlib, recall, a text file or a folder (default what the run trained on)")
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
    parser.add_argument("--sample", type=int, metavar="N", help="instead of evaluating, continue --prompt by N tokens")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue (default a line break)")
    parser.add_argument(
        "--new-window", action="store_true",
        help="continue in a new window that begins with the prompt's last token and knows the rest by the inserted vector alone "
        "(pretrained_recurrence, section 5.3; the paper takes --temperature 0)",
    )  # fmt: skip
    parser.add_argument(
        "--temperature", type=float, help="of sampling: below 1 favours probable tokens; 0 takes the most probable (default 0.8)"
    )
    parser.add_argument("--seed", type=int, help="of sampling (default 0)")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="auto takes a GPU where there is one (default auto)")
    return parser


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
    of_samples = ("prompt", "temperature", "seed", "new_window")
    if options.sample is None and any(was_given(options, name) for name in of_samples):
        raise InputError("--prompt, --temperature, --seed and --new-window go with --sample N; add it or leave them out")
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
    for name, least in (("batch", 1), ("sample", 1), ("sequences", 2), ("temporal_range", 2), ("temperature", 0), ("seed", 0)):
        if getattr(options, name) is not None and not getattr(options, name) >= least:
            raise InputError(f"{option_name(name)} is {getattr(options, name)}; it must be at least {least}")
    if options.prompt == "":
        raise InputError("--prompt is empty; give at least one character to continue")
    return options


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
    """The trained model, ready to evaluate, and its Settings."""
    path = checkpoint_path(run)
    contents = load_checkpoint(path, device)
    settings = settings_from(contents, path)
    torch.set_default_dtype(torch.float64 if settings.training.dtype == "float64" else torch.float32)
    model = MODELS[settings.model](evaluation_config(options, settings)).to(device)
    load_parameters(model, contents["parameters"], path, unused=".compression.")
    return model.eval(), settings


def memory_line(model, settings):
    """How the model is evaluated, where that is not how it was trained; otherwise None."""
    if settings.model == GPT2_MODEL:
        notes = differences(model.config, settings.model_config)
        return f"trained with {', '.join(notes)}" if notes else None
    if settings.model != "compressive":
        return None
    now, then = (", ".join(f"{name} {getattr(c, name)}" for name in MEMORIES) for c in (model.config, settings.model_config))
    return None if now == then else f"evaluated with {now}; trained with {then}"


def print_inspection(model, documents, lanes, options):
    """Print attention by age or compression loss by layer, over segments whose memories are full."""
    sequences = options.sequences or 1000
    with torch.autocast(next(model.parameters()).device.type, enabled=False):  # small differences need all their digits
        if options.attention_buckets:
            print("\n".join(bucket_table(attention_by_bucket(model, documents, lanes, sequences))))
            return
        for layer, loss in enumerate(compression_by_layer(model, documents, lanes, sequences).tolist(), start=1):
            print(f"layer {layer:<3} attention-reconstruction loss {loss:.3e}")


def print_temporal_range(model, documents, tokenizer, lanes, reach):
    """Print a row for each number of segments that the memory has carried."""
    if carries_nothing(model):
        raise InputError(f"--temporal-range {reach}: this model carries no memory; leave the option out")
    longest = longest_document(documents, model.config.segment, overlap_of(model.config))
    scores = temporal_range(model, documents, tokenizer, lanes, reach) if longest >= 2 * reach else []
    if not scores or not all(score.tokens for score in scores):
        raise InputError(
            f"--temporal-range {reach}: no document scores anything in its segments {reach + 1} to {2 * reach}; "
            f"give longer documents (--data) or a smaller number"
        )
    print("segments carried   bits per byte   right predictions   tokens scored")
    for carried, score in enumerate(scores):
        print(f"{carried:16d}   {score.bits_per_byte:13.4f}   {score.accuracy:17.1%}   {score.tokens:13d}")


def print_sample(model, tokenizer, options, device):
    """Print the prompt and its continuation."""
    text = os.fsencode(options.prompt or "\n")  # what was typed, be it UTF-8 or not
    prompt = torch.tensor(tokenizer.encode(text).astype("int64"), device=device)[None]
    generator = torch.Generator(device).manual_seed(options.seed or 0)
    sampling = Sampling(0.8 if options.temperature is None else options.temperature)
    go_on = continue_in_new_window if options.new_window else continue_text
    tokens = go_on(model, prompt, options.sample, sampling, generator)
    print(show_text(tokenizer, [*prompt[0].tolist(), *(token.item() for token in tokens)]))


def load_documents(options, settings, tokenizer, usual=("valid",)):
    """(what was read, {split: documents}) of --split or else the usual ones; InputError where one has nothing to predict."""
    data = options.data or settings.data.data
    splits = load_corpus(data, tokenizer, settings.recall, options.data_dir).splits
    splits = {split: splits[split] for split in ((options.split,) if options.split else usual)}
    for split, documents in splits.items():
        if not lengths_of(documents).any():
            raise InputError(f"--split {split} of {data} has nothing to predict; choose another split")
    return data, splits


def print_overlaps(options, device):
    """Print the table of all runs at the overlaps asked for."""
    runs, rows = [], []
    for run in dict.fromkeys(options.runs):
        model, settings = load_run(run, options, device)
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
        for config in configs:
            model.config = config
            with autocast(settings.training.dtype, device):
                lanes = options.batch or settings.training.batch
                rows.append(overlap_row(run, model, settings.model_config, splits, tokenizer, lanes, options.clear_memory))
    sizes = (f"{split} {words:,} words" for split, (_, words) in rows[0].scores.items())
    print(f"{sources[0]}: {', '.join(sizes)} of the original text, between white space")
    print("\n".join(overlap_table(rows)))


def print_score(score, words, data):
    """Print what a split adds up to."""
    print(f"bits per byte       {score.bits_per_byte:.4f}")
    print(f"bits per token      {score.bits_per_token:.4f}")
    print(f"perplexity          {score.perplexity(score.tokens):.3f}")
    if words:
        print(f"per word            {score.perplexity(words):.5g} ({words} words of the original text, between white space)")
    print(f"log-probability     {-score.nats:.2f} nats")
    print(f"tokens scored       {score.tokens}")
    if data == "recall":
        print(f"right answers       {score.accuracy:.1%} (chance {CHANCE:.0%})")


def main(argv):
    options = parse_options(argv)
    device = choose_device(options.device)
    if options.overlap is not None:
        print_overlaps(options, device)
        return
    model, settings = load_run(options.runs[0], options, device)
    tokenizer = run_tokenizer(options.runs[0], settings.data)
    with autocast(settings.training.dtype, device):
        if options.sample is not None:
            print_sample(model, tokenizer, options, device)
            return
        data, splits = load_documents(options, settings, tokenizer)
        [(split, documents)], lanes = splits.items(), options.batch or settings.training.batch
        print(model.describe())
        if line := memory_line(model, settings):
            print(line)
        if options.attention_buckets or options.compression_by_layer:
            print_inspection(model, documents, lanes, options)
            return
        if options.temporal_range is not None:
            print_temporal_range(model, documents, tokenizer, lanes, options.temporal_range)
            return
        score = evaluate(model, documents, tokenizer, lanes, clear_memory=options.clear_memory)
    memory = "memory cleared at every segment" if options.clear_memory else "memory carried through each document"
    memory = "no memory" if carries_nothing(model) else memory
    print(f"{settings.model} from {Path(options.runs[0])}, {split} split of {data}, {memory}")
    print_score(score, count_words(documents), data)


if __name__ == "__main__":
    run_program("eval.py", main)
