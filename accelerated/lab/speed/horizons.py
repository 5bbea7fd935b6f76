"""The table `horizons`: time and peak memory of the three back-propagation methods (Memformer, Table 3), for any model."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import torch

from accelerated.data.lanes import Segment
from accelerated.lab.speed import timing
from accelerated.lab.speed.timing import Variant, paired_ratios, print_table, sizes_line, spread
from accelerated.models import model_class
from accelerated.protocol import detach
from accelerated.replay import BACKPROP

HORIZONS = (1, 2, 4, 8, 16, 32)  # segments of a rollout
WINDOWS = (1, 4, 20)  # horizons of pretrained_recurrence; its paper uses 20
PAPER = "Memformer's Table 3, horizon 4: BPTT 16,177 MB, x1.00; checkpointing 9,885 MB, x0.48; memory replay 7,229 MB, x0.90"


def rollout_variant(name: str, model: Any, method: str, horizon: int, options: Namespace) -> Variant:
    """One rollout with a method, from a state in mid-document; gradients stay allocated between steps."""
    config, segments, device = model.config, [], options.device
    for tokens, targets in timing.random_segments(config.vocabulary, config.segment, options.batch, horizon, torch.device("cpu")):
        never = torch.zeros(options.batch, dtype=torch.bool)
        segments.append(Segment(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), never).to(device))
    with timing.computing(model, options):
        state = detach(model.advance(segments[0].tokens, model.initial_state(options.batch)))

    def step():
        model.zero_grad(set_to_none=False)
        with timing.computing(model, options):
            BACKPROP[method](model, segments, state)

    return Variant(name, step)


def configs_to_compare(model: str, config: Any) -> dict:
    """{name: config} to compare the methods on; for memformer, the paper's two models at this width."""
    if model == "block_recurrent":
        return {model: replace(config, segment=2 * config.window)}  # 32 segments must fit into memory
    if model == "memformer":
        return {
            "encoder-decoder, 4+8 layers": replace(config, encoder_layers=4, decoder_layers=8),
            "decoder-only, 12 layers": replace(config, encoder_layers=0, decoder_layers=12),
        }
    return {model: config}


def report(options: Namespace) -> None:
    """Print a row for each method at each horizon; speed is relative to full BPTT, pair by pair."""
    if options.model == "memformer":
        print(PAPER)
    for title, config in configs_to_compare(options.model, options.config).items():
        model = model_class(options.model)(config).to(options.device)
        state = sum(field.numel() * field.element_size() for field in model.initial_state(options.batch)) / 1e6
        print(f"{title}: {sizes_line(config, options.batch)}; a stored state is {state:.2f} MB")
        rows = [("horizon", "method", "ms", "speed of BPTT's", "peak MB", "of BPTT's")]
        for horizon in WINDOWS if options.model == "pretrained_recurrence" else HORIZONS:
            variants = [rollout_variant(method, model, method, horizon, options) for method in BACKPROP]
            times = timing.time_in_turn(variants, options.repeats, options.device)
            peaks = [timing.peak_memory(variant.step, options.device) for variant in variants]
            for (name, spent), peak in zip(times.items(), peaks, strict=True):
                speed = spread(paired_ratios(times["through_time"], spent), ".2f")
                milliseconds = spread([1e3 * second for second in spent], ".0f")
                rows.append((str(horizon), name, milliseconds, speed, f"{peak / 1e6:.1f}", f"{peak / peaks[0]:.2f}"))
        print_table(*rows)
