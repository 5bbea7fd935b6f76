"""The model sizes that the bench measures: small ones for a CPU, the papers' for a GPU."""

from typing import Any

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.memformer import Memformer
from accelerated.pretrained_recurrence import PretrainedRecurrence

SIZES = {
    ("block_recurrent", "cpu"): BlockRecurrent.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, window=128, segment=1024, states=128,
        recurrent_layers=(4,), dropout=0.0,
    ),
    ("block_recurrent", "cuda"): BlockRecurrent.Config(
        width=1024, layers=12, heads=8, head_width=128, feed_forward=4096, window=512, segment=4096, states=512,
        recurrent_layers=(10,), dropout=0.0,
    ),
    ("compressive", "cpu"): Compressive.Config(
        width=256, layers=6, heads=4, head_width=64, feed_forward=1024, segment=256, memory=256, compressed_memory=64,
        compression_rate=4,
    ),
    ("compressive", "cuda"): Compressive.Config(
        width=1024, layers=18, heads=16, head_width=64, feed_forward=4096, segment=512, memory=512, compressed_memory=512,
        compression_rate=4,
    ),
    ("pretrained_recurrence", "cpu"): PretrainedRecurrence.Config(
        width=256, layers=6, heads=4, feed_forward=1024, max_positions=256, segment=128,
    ),
    ("pretrained_recurrence", "cuda"): PretrainedRecurrence.Config(
        vocabulary=50257, width=768, layers=12, heads=12, feed_forward=3072, max_positions=1024, segment=300,
    ),
    ("memformer", "cpu"): Memformer.Config(
        width=256, encoder_layers=3, decoder_layers=3, heads=4, head_width=64, feed_forward=1024, segment=64, slots=32,
    ),
    ("memformer", "cuda"): Memformer.Config(
        width=512, encoder_layers=4, decoder_layers=8, heads=8, head_width=64, feed_forward=2048, segment=64, slots=32,
    ),
}  # fmt: skip
SEGMENTS = {"block_recurrent": 1, "compressive": 4, "memformer": 16, "pretrained_recurrence": 4}  # per training step
BATCH = {"block_recurrent": 4, "compressive": 4, "memformer": 8, "pretrained_recurrence": 8}


def sizes_line(config: Any, batch: int) -> str:
    """The sizes of a config in one line, by their letters."""
    letters = {"D": "width", "L": "layers", "L encoder": "encoder_layers", "L decoder": "decoder_layers", "H": "heads"}
    letters |= {"E": "head_width", "F": "feed_forward", "N": "segment", "W": "window", "S": "states", "S slots": "slots"}
    letters |= {"M": "memory", "C": "compressed_memory", "c": "compression_rate"}
    sizes = [f"{letter} {getattr(config, field)}" for letter, field in letters.items() if hasattr(config, field)]
    return ", ".join([*sizes, f"B {batch}"])
