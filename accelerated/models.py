"""The models by name, for everything that takes --model."""

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.memformer import Memformer
from accelerated.pretrained_recurrence import PretrainedRecurrence

MODELS = {
    "block_recurrent": BlockRecurrent,
    "compressive": Compressive,
    "memformer": Memformer,
    "pretrained_recurrence": PretrainedRecurrence,
}
