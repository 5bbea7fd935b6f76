"""The table `horizons`: time and peak memory of the three back-propagation methods (Memformer, Table 3), for any model."""

from argparse import Namespace
from dataclasses import replace
from functools import partial

from accelerated.lab.speed.timing import COLUMNS, measured_rows, print_table
from accelerated.lab.speed.variants import random_model, rollout_variant
from accelerated.models import presets_of
from accelerated.replay import BACKPROP

HORIZONS = (1, 2, 4, 8, 16, 32)  # segments of a rollout


def report(options: Namespace) -> None:
    """Print a table for each horizon; speed and memory are relative to full BPTT."""
    facts = presets_of(options.model).SPEED
    for title, changes in facts.get("replayed", {options.model: {}}).items():
        network = random_model(options.model, replace(options.config, **changes), options.device)
        state = sum(field.numel() * field.element_size() for field in network.initial_state(options.batch)) / 1e6
        print(f"{title}, {options.batch} lanes; a stored state is {state:.2f} MB\n")
        for horizon in options.horizons or facts.get("horizons", HORIZONS):
            makers = {way: partial(rollout_variant, way, network, way, horizon, options) for way in BACKPROP}
            print_table((f"horizon {horizon}", *COLUMNS), *measured_rows(makers, options))
