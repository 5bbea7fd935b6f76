"""Record what the gates of trained Block-Recurrent runs keep: python -m docs.gates RUN RUN ...

RUN is a run of train.py --data recall. Its test documents are read with 512 tokens of filler.
docs/figures.py draws the record.
"""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accelerated import load
from accelerated.block_recurrent import FixedGate, LSTMGate
from accelerated.data.recall import RecallDocuments
from accelerated.evaluation.score import carried_through
from accelerated.program.errors import InputError, run_program
from reference.block_recurrent import fixed_gate_forward
from reference.variants.block_recurrent import lstm_gate_forward

RECORD = Path(__file__).parent / "figures" / "block_recurrent_gates.json"
FILLER = 512  # tokens
WROTE = 2  # blocks that see the facts: their own and the next


def kept_and_written(gate: FixedGate | LSTMGate, carry: Tensor, hidden: Tensor) -> tuple:
    """The shares of the carried state and of the candidate in the next state.

    They are (B, S, D) each, or (D,) if they are the same for all states.
    """
    p = {name: value.numpy() for name, value in gate.state_dict().items()}
    if isinstance(gate, FixedGate):
        _, (*_, g) = fixed_gate_forward(p, carry.numpy(), hidden.numpy())
        return g, 1 - g
    _, (*_, i, f) = lstm_gate_forward(p, carry.numpy(), hidden.numpy())
    return f, i


@torch.no_grad()
def gates_of(path: str) -> dict:
    """What a run's gate keeps and writes at each block, means over documents, states and features.

    `left` is the share of what a state held after the facts that no later block has taken away.
    Raises InputError if it is no run of recall with one gate.
    """
    model, _, settings = load(path)
    gates = [each for each in model.modules() if isinstance(each, FixedGate | LSTMGate)]
    if settings.data.data != "recall" or len(gates) != 1:
        raise InputError(f"{path} is no run of --data recall with one gate; give another run")
    [gate] = gates
    documents = RecallDocuments(dataclasses.replace(settings.recall, distance=FILLER), "test")
    shares = []  # of each block

    def watch(gate: FixedGate | LSTMGate, given: tuple, _: Tensor) -> None:
        shares.append(kept_and_written(gate, *given))

    gate.register_forward_hook(watch)
    for _ in carried_through(model, documents, len(documents), predict=False):
        pass
    kept, written = map(np.array, zip(*shares, strict=True))  # (blocks, ...)
    left = kept[WROTE:].cumprod(0)
    record = {"gate": model.config.gate, "seed": settings.training.seed}
    record |= {"window": model.config.window, "filler": FILLER}
    for name, values in (("kept", kept), ("written", written), ("left", left)):
        means = values.reshape(len(values), -1).mean(1, dtype=float)
        record[name] = means.round(4).tolist()
    return record


def main(runs: list[str]) -> None:
    """Write the record of these runs; raises InputError if there are none, or one is no such."""
    if not runs:
        raise InputError("give the runs to record: python -m docs.gates RUN ...")
    record = [gates_of(path) for path in runs]
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RECORD}; draw it with python -m docs.figures")


if __name__ == "__main__":
    run_program("gates", main, sys.argv[1:])
