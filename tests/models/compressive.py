"""Compressive: what its tests must know, by the names of tests/helpers/variants.py."""

from reference.compressive import State
from reference.variants.compressive import COMPRESSION_LOSSES, COMPRESSIONS

SIMPLIFIED = {"positions": "simplified", "max_distance": 9}  # less than the distances of 25 keys
AUTHORS = {"authors_code": True}

VARIANTS = {
    f"{compression}-{loss}": {"compression": compression, "compression_loss": loss}
    for compression in COMPRESSIONS
    for loss in COMPRESSION_LOSSES
}
VARIANTS |= {
    "transformer-xl": {"compressed_memory": 0},
    "no-memory": {"memory": 0},
    "nothing-remembered": {"memory": 0, "compressed_memory": 0},
    "short-memory": {"memory": 3},
    "short-memory-most-used": {"memory": 3, "compression": "most_used"},
    "short-memory-bptt": {"memory": 3, "compression_loss": "bptt"},
    "compressed-holds-half-a-segment": {"compressed_memory": 1, "compression_loss": "bptt"},
    "rate-one": {"compression_rate": 1},
    "rate-of-a-segment": {"compression_rate": 8, "compression_loss": "auto_encoding"},
    "wide-dilations": {"compression": "dilated_conv", "dilations": (3, 11)},
    "one-layer": {"layers": 1},
    "leftover-max_pooling": {"compression_rate": 5, "compression": "max_pooling"},
    "leftover-auto_encoding-norm": {
        "compression_rate": 3,
        "compression_loss": "auto_encoding_norm",
    },
    "attention-norm": {"compression_loss": "attention_reconstruction_norm"},
    "memory-by-layer": {"memories": (3, 12, 0)},
    "rows-by-layer": {"memories": (3, 12, 0, 5, 0, 2)},
    "rows-by-layer-bptt": {
        "memories": (0, 9, 12, 0, 4, 1),
        "compression_loss": "bptt",
    },
    "authors-attention": AUTHORS,
    "authors-dilated-bptt": AUTHORS
    | {
        "compression": "dilated_conv",
        "compression_loss": "bptt",
        "dilations": (1, 2),
        "compression_rate": 2,
    },
    "authors-by-layer-most-used": AUTHORS
    | {"compression": "most_used", "memories": (12, 4, 0, 2, 0, 5)},
    "authors-transformer-xl": AUTHORS | {"compressed_memory": 0},
    "adaptive-attention_reconstruction": {"cutoffs": (3, 7), "div_value": 2},
    "adaptive-conv-bptt": {"cutoffs": (4,), "compression_loss": "bptt"},
    "simplified-attention_reconstruction": SIMPLIFIED,
    "simplified-conv-bptt": SIMPLIFIED | {"compression_loss": "bptt"},
    "simplified-short-memory-most-used": SIMPLIFIED | {"memory": 3, "compression": "most_used"},
    "simplified-transformer-xl": SIMPLIFIED | {"compressed_memory": 0, "max_distance": 40},
}
KINDS = ("conv-bptt",)
MORE_KINDS = (
    "most_used-none",
    "transformer-xl",
    "simplified-attention_reconstruction",
    "simplified-short-memory-most-used",
    "authors-attention",
)
OTHER_TYPES = (
    "adaptive-attention_reconstruction",
    "rate-of-a-segment",
    "wide-dilations",
    "leftover-auto_encoding-norm",
    "rows-by-layer",
)

WRONG_LENGTHS = {length: f"{length} tokens is not one of 8" for length in (0, 4, 9)}
DESCRIBED = {
    "conv-attention_reconstruction": (
        96,
        "3 layers x (12 + 4 x 5) = 96 tokens, and segments of 8",
    ),
    # One row of a segment of 8, whose last three tokens are left over: five rows are of 40 tokens
    "leftover-max_pooling": (156, "3 layers x (12 + 5 x 5) = 111 tokens"),
    "rows-by-layer": (43, "3 layers x at most (12 + 4 x 5) = "),
    "authors-dilated-bptt": (96, "3 layers x (12 + 2 x 5) = "),
}


def random_state(config, rng, batch):
    """A random state of both memories."""
    memory = rng.standard_normal((batch, config.layers, config.memory, config.width))
    compressed = rng.standard_normal((batch, config.layers, config.compressed_memory, config.width))
    return State(memory, compressed)
