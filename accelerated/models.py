"""The models by name."""

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive

MODELS = {"block_recurrent": BlockRecurrent, "compressive": Compressive}
