"""The models, by the names that --model takes."""

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
