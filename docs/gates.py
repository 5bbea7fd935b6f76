"""Record what the gates of trained Block-Recurrent runs keep: python -m docs.gates RUN RUN ...

RUN is a run of train.py --data recall. Its test documents are read with 512 tokens of filler.
docs/figures.py draws the record.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from accelerated import load
from accelerated.block_recurrent import FixedGate, LSTMGate
from accelerated.data.recall import RecallDocuments
from accelerated.evaluation.score import carried_through

RECORD = Path(__file__).parent / "figures" / "block_recurrent_gates.json"
FILLER = 512  # tokens
WROTE = 2  # blocks that see the facts: their own and the next


def kept_and_written(gate: FixedGate | LSTMGate, carry: Tensor, hidden: Tensor) -> list[Tensor]:
    """The shares of the carried state and of the candidate in the next state, (B, S, D) each."""
    if isinstance(gate, FixedGate):
        kept = torch.sigmoid(gate.bias_g).expand_as(carry)
        return [kept, 1 - kept]
    kept = functional.linear(hidden, gate.weight_f, gate.bias_f + 1)  # Eq. 6
    written = functional.linear(hidden, gate.weight_i, gate.bias_i - 1)  # Eq. 5
    return [torch.sigmoid(kept), torch.sigmoid(written)]


@torch.no_grad()
def gates_of(path: str) -> dict:
    """What a run's gate keeps and writes at each block, means over documents, states and features.

    `left` is the share of what a state held after the facts that no later block has taken away.
    """
    model, _, settings = load(path)
    documents = RecallDocuments(dataclasses.replace(settings.recall, distance=FILLER), "test")
    shares = []  # of each block

    def watch(gate: FixedGate | LSTMGate, given: tuple, _: Tensor) -> None:
        shares.append(torch.stack(kept_and_written(gate, *given)))

    [gate] = [each for each in model.modules() if isinstance(each, FixedGate | LSTMGate)]
    gate.register_forward_hook(watch)
    for _ in carried_through(model, documents, len(documents), predict=False):
        pass
    kept, written = torch.stack(shares, 1)  # (blocks, B, S, D) each
    left = kept[WROTE:].cumprod(0)
    named = {"kept": kept, "written": written, "left": left}
    means = {name: values.mean((1, 2, 3)).tolist() for name, values in named.items()}
    rounded = {name: [round(value, 4) for value in values] for name, values in means.items()}
    about = {"gate": model.config.gate, "seed": settings.training.seed}
    return about | {"window": model.config.window, "filler": FILLER} | rounded


if __name__ == "__main__":
    record = [gates_of(path) for path in sys.argv[1:]]
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {RECORD}; draw it with python -m docs.figures")
