"""The table `generation`: time per generated token after 1,000 and after 100,000 tokens."""

import time
from argparse import Namespace

import torch

from accelerated.evaluation.generation import Sampling, generate, read_prompt
from accelerated.evaluation.score import evaluating
from accelerated.lab.speed.timing import paired_ratios, print_table, spread
from accelerated.models import NAMES, model_class
from accelerated.training.settings import preset_settings

POSITIONS = (1_000, 100_000)
TOKENS = 200  # timed together


def report(options: Namespace) -> None:
    """Print milliseconds per token at both positions, measured in turns, and their ratio, for each model's preset tiny."""
    rows = [("model", *(f"ms after {position:,}" for position in POSITIONS), "ratio")]
    for name in NAMES:
        model = model_class(name)(preset_settings(name, "tiny").model_config)
        generator, times = torch.Generator().manual_seed(0), {position: [] for position in POSITIONS}
        with evaluating(model), torch.no_grad():
            text = torch.randint(256, (1, max(POSITIONS)), generator=generator)
            starts = {position: read_prompt(model, text[:, :position]) for position in POSITIONS}
            for _ in range(options.repeats):
                for position, (logits, stream) in starts.items():
                    begun = time.perf_counter()
                    for _ in generate(model, logits, stream, TOKENS, Sampling(0.8), generator):
                        pass
                    times[position].append(1e3 * (time.perf_counter() - begun) / TOKENS)
        late, early = times[max(POSITIONS)], times[min(POSITIONS)]
        rows.append((name, *(spread(found, ".2f") for found in times.values()), spread(paired_ratios(late, early), ".3f")))
    print_table(*rows)
