"""The models by name."""

from accelerated.block_recurrent import BlockRecurrent

MODELS = {"block_recurrent": BlockRecurrent}
