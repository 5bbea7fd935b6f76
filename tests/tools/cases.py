"""The cases of the conformance vectors: vectors.py writes them, tests check them."""

import dataclasses
import itertools
from collections.abc import Iterable

from reference import (
    block_recurrent,
    compressive,
    gated_deltanet,
    memformer,
    memorizing,
    pretrained_recurrence,
)
from reference.variants.compressive import COMPRESSION_LOSSES, COMPRESSIONS

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
)
CONFIGS = {
    "block_recurrent": block_recurrent.Config(
        **LAYERS, **BUCKETS, window=4, segment=8, recurrent_layers=(1,), states=5
    ),
    "compressive": compressive.Config(
        **LAYERS, segment=4, memory=6, compressed_memory=3, compression_rate=2
    ),
    "gated_deltanet": gated_deltanet.Config(**LAYERS, value_width=2, segment=4),
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
ONE = {"layers": 1}  # where a file shows the inside of the layer
TWO = {"encoder_layers": 2, "decoder_layers": 2}
SHORT = {"memory": 2}  # less than a segment: a segment's own rows are compressed at once
# Less, because all files together may have 4,000,000 bytes
LESS = {"layers": 1, "head_width": 2, "feed_forward": 3, "vocabulary": 5}
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
PROJECTED = {"vocabulary": 3, "head_width": 2, "feed_forward": 2, "segment": 3, "slots": 2}
NO_BLOCK = {"recurrent_layers": ()}
AUTHORS = {"authors_code": True}
# {case: sizes} of gates and configurations, and of compressions and losses, which have others
OTHER_GATES = {"fixed-skip": ONE, "lstm-dual": ONE}
OTHER_GATES |= dict.fromkeys(("fixed-single", "fixed-dual", "lstm-single"), LESS)
OTHER_COMPRESSIONS = {"conv-attention_reconstruction": ONE, "conv-none": LESS}
OTHER_COMPRESSIONS |= {"dilated_conv-none": LESS, "dilated_conv-auto_encoding": LESS}
for loss in COMPRESSION_LOSSES:
    for pooling in ("max_pooling", "mean_pooling", "most_used"):
        OTHER_COMPRESSIONS[f"{pooling}-{loss}"] = LESS


def pairs_of(fields: dict[str, Iterable[str]], others: dict) -> dict:
    """{"a-b": its fields} of all pairs of two fields' values, with what others says of a case."""
    first, second = fields
    found = {}
    for pair in itertools.product(*fields.values()):
        name = "-".join(pair)
        found[name] = {first: pair[0], second: pair[1]} | others.get(name, {})
    return found


GATES = {"gate": ("fixed", "lstm"), "configuration": ("skip", "single", "dual")}
TRAINED = {"compression": COMPRESSIONS, "compression_loss": COMPRESSION_LOSSES}
VARIANTS = {  # {paper: {case: the fields of its config that it changes}}
    "block_recurrent": pairs_of(GATES, OTHER_GATES)
    | {
        "feedback": {"feedback": True},
        "feedback-of-layer-2": SECOND | {"feedback": True, "recurrent_layers": (2,)},
        "two-recurrent": {"layers": 3, "recurrent_layers": (1, 3)},
        "slide": NO_BLOCK,
        "xl": NO_BLOCK | {"segment": 4},
        "output-dropout": SECOND | {"output_dropout": True},
    },
    "compressive": pairs_of(TRAINED, OTHER_COMPRESSIONS)
    | {
        "short-memory": SHORT,
        "short-memory-bptt": SHORT | {"compression_loss": "bptt"},
        "short-memory-most_used": LESS | SHORT | {"compression": "most_used"},
        "compressed-only": LESS | {"memory": 0},
        "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
        "transformer-xl": {"compressed_memory": 0},
        "transformer-xl-short": ONE | {"compressed_memory": 0, "memory": 2},
        "no-memory": {"compressed_memory": 0, "memory": 0},
        "simplified": LITTLE
        | {"positions": "simplified", "max_distance": 5, "vocabulary": 3, "width": 3},
        "adaptive": LITTLE | {"cutoffs": (3, 5), "div_value": 2},
        "attention_reconstruction-norm": LESS
        | {"compression_loss": "attention_reconstruction_norm"},
        "auto_encoding-norm": LESS | {"compression_loss": "auto_encoding_norm", "dilations": ()},
        "rate-not-of-a-segment": LESS | {"compression_rate": 3, "compression_loss": "bptt"},
        "rows-by-layer": LESS | {"layers": 2, "memories": (6, 3, 0, 2)},
        "authors-code": LESS | AUTHORS | {"layers": 2, "memories": (4, 6, 3, 1)},
        "authors-code-dilated_conv": LESS
        | AUTHORS
        | {"compression": "dilated_conv", "compression_loss": "bptt", "dilations": (1,)},
    },
    "gated_deltanet": {"one-layer": ONE, "two-layers": LESS | {"layers": 2}},
    "memformer": {
        "continuation": {},
        "infilling": {},
        "recall": {},
        "all-tasks": {},
        "two-layers": TWO,
        "two-layers-transformer-xl": TWO | {"positions": "transformer_xl"},
        "max_distance-of-a-segment": {"max_distance": 6},
        "projected-slots": PROJECTED | {"slot_value": "projected"},
        "max_distance-by-default": {"max_distance": 64},
        "transformer-xl": {"positions": "transformer_xl"},
        "decoder-only": {"encoder_layers": 0},
        "decoder-only-transformer-xl": {"encoder_layers": 0, "decoder_layers": 2}
        | {"positions": "transformer_xl"},
        "biased-slots": PROJECTED | {"slot_normalization": "biased"},
    },
    "memorizing": {
        "retrieval": ONE | {"memory_layer": 1},
        "short-memory": {"memory": 3},
        "transformer-xl": LESS | {"memory_layer": 1, "memory": 0},
        "output-dropout": LESS | {"memory_layer": 1, "output_dropout": True},
    },
    "pretrained_recurrence": {
        "mean": ONE,
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
# {Memformer's case: the tasks of every lane in each segment, or none}
TASKS = {
    "infilling": ((), (1, 1, 1), (1, 1, 1)),
    "recall": ((), (2, 2, 2), (2, 2, 2)),
    "all-tasks": ((), (0, 1, 2), (1, 2, 0)),
    "transformer-xl": ((1, 2, 0), (0, 1, 2), (1, 2, 0)),
    "two-layers": ((0, 1, 2), (1, 2, 0), ()),
    "two-layers-transformer-xl": ((2, 0, 1), (0, 1, 2), (1, 2, 0)),
}
# The cases with steps of optimisers, which are the same for all
STEPPED = ("slide", "conv-bptt", "recall", "retrieval", "mean")


def config_of(paper: str, name: str) -> object:
    """The config of a case."""
    return dataclasses.replace(CONFIGS[paper], **VARIANTS[paper][name])
