"""The tables `tokenising`, `loading`, `generation` and `memory`: what texts cost before and after training."""

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch

from accelerated.bench.timing import spread
from accelerated.data.corpus import load_corpus, tokenised
from accelerated.data.lanes import Lanes
from accelerated.data.recall import RecallConfig
from accelerated.data.sources import read_bytes, source_of_path, standard_library
from accelerated.data.tokenizers import ByteTokenizer, train_bpe
from accelerated.data.windows import overlap_of
from accelerated.evaluation.generation import Sampling, generating, go_on, read_prompt
from accelerated.models import MODELS
from accelerated.replay import BACKPROP
from accelerated.training.settings import preset_settings

MEGABYTE = 1_000_000
POSITIONS = (1_000, 100_000)
ROOT = Path(__file__).parents[2]


def write_text(path: Path, size: int) -> None:
    """Write a file of `size` bytes: the standard library's source, again and again."""
    source = b"".join(piece for text in standard_library().texts(None) for piece in read_bytes(text[1]))
    with open(path, "wb") as file:
        for start in range(0, size, len(source)):
            file.write(source[: size - start])


def report_tokenising(options: Namespace) -> None:
    """Print MB of text a second: bytes through the whole cache, BPE of 8,000 tokens on one core alone."""
    bpe = train_bpe(standard_library(), 8000, None)
    with tempfile.TemporaryDirectory() as folder:
        path, rates, alone = Path(folder) / "text.txt", [], []
        write_text(path, 250 * MEGABYTE)
        for turn in range(options.repeats):
            begun = time.perf_counter()
            tokenised(source_of_path(path), ByteTokenizer(), Path(folder) / str(turn))
            rates.append(250 / (time.perf_counter() - begun))
        with open(path, "rb") as file:
            text = file.read(10 * MEGABYTE)
        pieces = [text[start : start + (1 << 20)] for start in range(0, len(text), 1 << 20)]
        for _ in range(options.repeats):
            begun = time.perf_counter()
            for piece in pieces:
                bpe.encode(piece)
            alone.append(10 / (time.perf_counter() - begun))
    print(f"bytes, 250 MB into the cache       {spread(rates, '.0f')} MB/s")
    print(f"tiktoken, 8,000 tokens, one core   {spread(alone, '.1f')} MB/s")


def report_loading(options: Namespace) -> None:
    """Print the share of a training step that dealing its tokens takes, with each model's default preset."""
    with tempfile.TemporaryDirectory() as folder:
        documents = load_corpus("stdlib", ByteTokenizer(), RecallConfig(), Path(folder)).splits["train"]
        for name in MODELS:
            settings = preset_settings(name, "tiny")
            config, training = settings.model_config, settings.training
            model = MODELS[name](config)
            lanes = Lanes(documents, training.batch, config.segment, 0, overlap_of(config))
            state, shares, dealing = model.initial_state(training.batch), [], []
            for _ in range(options.repeats + 1):
                begun = time.perf_counter()
                segments = [next(lanes) for _ in range(training.horizon)]
                dealt = time.perf_counter()
                _, state = BACKPROP[training.backprop](model, segments, state)
                done = time.perf_counter()
                dealing.append(1000 * (dealt - begun))
                shares.append(100 * (dealt - begun) / (done - begun))
            print(f"{name:<22} {spread(dealing[1:], '.2f')} ms, {spread(shares[1:], '.2f')}% of forward and backward")


def report_generation(options: Namespace) -> None:
    """Print the time of a token after 1,000 and after 100,000 tokens, in turn, 200 tokens at a time."""
    for name in MODELS:
        model = MODELS[name](preset_settings(name, "tiny").model_config)
        with generating(model), torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            text = torch.randint(256, (1, max(POSITIONS)), generator=generator)
            starts = {position: read_prompt(model, text[:, :position]) for position in POSITIONS}
            times = {position: [] for position in POSITIONS}
            for _ in range(options.repeats):
                for position, (logits, stream) in starts.items():
                    begun = time.perf_counter()
                    for _ in go_on(model, logits, stream, 200, Sampling(0.8), generator):
                        pass
                    times[position].append(1000 * (time.perf_counter() - begun) / 200)
        ratios = [late / early for early, late in zip(*times.values(), strict=True)]
        shown = ", ".join(f"{spread(found, '.2f')} ms after {position:,}" for position, found in times.items())
        print(f"{name:<22} {shown}; ratio {spread(ratios, '.3f')}")


def peak_memory(size: int, folder: str) -> float:
    """MB that train.py holds at most, tokenising a text of `size` bytes and then training 300 steps on it."""
    path = Path(folder) / f"{size}.txt"
    write_text(path, size)
    code = "import resource, sys, train; train.main(sys.argv[1:]); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    options = ["--data", path, "--steps", 300, "--sample", 0, "--validation-segments", 2, "--out", Path(folder) / f"run-{size}"]
    argv = [sys.executable, "-c", code, *map(str, options), "--data-dir", folder]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1]) / 1024


def report_memory(options: Namespace) -> None:
    """Print the most memory that train.py holds with 1 GB of text, over that with 1 MB."""
    with tempfile.TemporaryDirectory() as folder:
        small, large = (peak_memory(size * MEGABYTE, folder) for size in (1, 1000))
    print(f"1 MB of text {small:.0f} MB, 1 GB {large:.0f} MB: {large - small:+.0f} MB")
