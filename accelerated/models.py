"""The models, by the names that --model takes."""

from accelerated.block_recurrent import BlockRecurrent
from accelerated.compressive import Compressive
from accelerated.memformer import Memformer
from accelerated.memorizing import Memorizing
from accelerated.pretrained_recurrence import PretrainedRecurrence

MODELS = {
    "block_recurrent": BlockRecurrent,
    "compressive": Compressive,
    "memformer": Memformer,
    "memorizing": Memorizing,
    "pretrained_recurrence": PretrainedRecurrence,
}
