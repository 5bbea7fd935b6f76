"""The cases of the conformance vectors, and which values inside a layer they show.

Vectors.py writes them, tests check them.
"""

import dataclasses
import itertools
import re
from fnmatch import fnmatch
from pathlib import Path

from reference import block_recurrent, compressive, memformer, memorizing, pretrained_recurrence

SMALL = {"vocabulary": 7, "width": 4, "heads": 2, "feed_forward": 5}
LAYERS = SMALL | {"layers": 2, "head_width": 3}
BUCKETS = {"buckets": 4, "max_distance": 6, "attention_scale": 3.0, "dropout": 0.0}
MEMFORMER = memformer.Config(
    **SMALL,
    encoder_layers=1,
    decoder_layers=1,
    head_width=3,
    segment=6,
    slots=5,
    max_distance=3,
    retention=0.5,
)
CONFIGS = {
    "block_recurrent": block_recurrent.Config(
        **LAYERS, **BUCKETS, window=4, segment=8, recurrent_layers=(1,), states=5
    ),
    "compressive": compressive.Config(
        **LAYERS, segment=4, memory=6, compressed_memory=3, compression_rate=2
    ),
    "memformer": MEMFORMER,
    "memorizing": memorizing.Config(
        **LAYERS, **BUCKETS, segment=4, memory_layer=2, memory=9, retrieved=3
    ),
    "pretrained_recurrence": pretrained_recurrence.Config(
        **(SMALL | {"width": 6}),
        layers=2,
        max_positions=9,
        segment=8,
        insertion_layers=(1,),
        module_width=4,
    ),
}
SHORT = {"memory": 2}  # less than a segment: a segment's own rows are compressed at once
# Little, because all files together may have 3,150,000 bytes
LITTLE = {
    "layers": 1,
    "head_width": 2,
    "feed_forward": 2,
    "memory": 3,
    "compressed_memory": 2,
    "compression": "mean_pooling",
}
SECOND = {
    "vocabulary": 3,
    "width": 3,
    "heads": 1,
    "head_width": 2,
    "feed_forward": 2,
    "window": 2,
    "segment": 4,
    "states": 2,
}
VARIANTS = {  # {paper: {case: the fields of its config that it changes}}
    "block_recurrent": {
        f"{gate}-{configuration}": {"gate": gate, "configuration": configuration}
        for gate, configuration in itertools.product(("fixed", "lstm"), ("skip", "single", "dual"))
    }
    | {
        "feedback": {"feedback": True},
        "feedback-of-layer-2": SECOND | {"feedback": True, "recurrent_layers": (2,)},
        "two-recurrent": {"layers": 3, "recurrent_layers": (1, 3)},
        "slide": {"recurrent_layers": ()},
        "xl": {"recurrent_layers": (), "segment": 4},
    },
    "compressive": {
        f"{compression}-{loss}": {"compression": compression, "compression_loss": loss}
        for compression, loss in itertools.product(
            compressive.COMPRESSIONS, compressive.COMPRESSION_LOSSES
        )
    }
    | {
        "short-memory": SHORT,
        "short-memory-bptt": SHORT | {"compression_loss": "bptt"},
        "short-memory-most_used": SHORT | {"compression": "most_used"},
        "compressed-only": {"memory": 0},
        "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
        "transformer-xl": {"compressed_memory": 0},
        "transformer-xl-short": {"compressed_memory": 0, "memory": 2},
        "no-memory": {"compressed_memory": 0, "memory": 0},
        "simplified": LITTLE
        | {"positions": "simplified", "max_distance": 5, "vocabulary": 3, "width": 3},
        "adaptive": LITTLE | {"cutoffs": (3, 5), "div_value": 2},
    },
    "memformer": {name: {} for name in ("continuation", "infilling", "recall", "all-tasks")}
    | {
        "two-layers": {"encoder_layers": 2, "decoder_layers": 2},
        "transformer-xl": {"positions": "transformer_xl"},
        "decoder-only": {"encoder_layers": 0, "decoder_layers": 2},
        "decoder-only-transformer-xl": {
            "encoder_layers": 0,
            "decoder_layers": 2,
            "positions": "transformer_xl",
        },
    },
    "memorizing": {"retrieval": {}, "short-memory": {"memory": 3, "layers": 1, "memory_layer": 1}},
    "pretrained_recurrence": {
        "mean": {},
        "max": {"pooling": "max"},
        "attention": {"pooling": "attention"},
        "several-vectors": {"vectors": 4},
        "several-layers": {"layers": 3, "insertion_layers": (1, 3)},
        "overlap": {"overlap": 2},
        "overlap-advance": {"overlap": 2, "pool": "advance"},
        "pooled-after-the-norm": {"pool_final_norm": True},
        "linear-module": {"module_layers": 0},
        "plain": {"vectors": 0},
    },
}
EVERY_CASE = [(paper, name) for paper, variants in VARIANTS.items() for name in variants]
# {Memformer's case: the tasks of every lane in the second and third segment}; of others, none
TASKS = {
    "infilling": ((1, 1, 1), (1, 1, 1)),
    "recall": ((2, 2, 2), (2, 2, 2)),
    "all-tasks": ((0, 1, 2), (1, 2, 0)),
    "transformer-xl": ((0, 1, 2), (1, 2, 0)),
}


def config_of(paper: str, name: str) -> object:
    """The config of a case."""
    return dataclasses.replace(CONFIGS[paper], **VARIANTS[paper][name])


# Values inside a layer, in the order of computation. Below a paper and its cases that have them
# (more would not fit) stand forward functions, each called by the one before it or further down,
# [1] in its second call, and VARIABLE=NAME, or a variable that keeps its name. They are of the
# first such call in the first segment; "return" is what a function returns.
INNER = Path(__file__).with_name("inner_values.txt").read_text()


def inner_values(paper: str, name: str) -> list[tuple[list, dict]]:
    """[(functions, {local variable: name})] of what a case shows of the inside of a layer."""
    listed = []
    shown = False
    for line in INNER.strip().splitlines():
        if not line.startswith(" "):
            of, *cases = line.split()
            shown = of == paper and any(fnmatch(name, pattern) for pattern in cases)
        elif shown:
            functions, _, values = re.sub(r"(\w{2,})(?=.*: )", r"\1_forward", line).partition(": ")
            pairs = (value.rpartition("=") for value in values.split(", "))
            listed.append((functions.split(), {local or own: own for local, _, own in pairs}))
    return listed
