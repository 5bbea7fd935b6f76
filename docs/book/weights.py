"""Weights for the page "Try one": python -m docs.book.weights STATE ROW STAGE.

STATE is a state_dict of accelerated/lab/memory.py, .pt or .safetensors; ROW is a row of that
experiment and STAGE one of its stages. It writes docs/results/weights/ROW-STAGE.safetensors, in
float16, with all that the page must know in its metadata: the page offers every file that is there.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from docs.book.try_one import SEEN
from docs.excerpts import ROOT
from reference.check import load

FOLDER = ROOT / "docs" / "results" / "weights"
LARGEST = 500_000  # bytes of a file


def read_state(path: Path) -> dict[str, np.ndarray]:
    """{name: array} of a state_dict."""
    if path.suffix == ".safetensors":
        arrays, _ = load(path)
        return arrays
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.float().numpy() for name, tensor in state.items()}


def about(row: str, stage: str) -> dict[str, str]:
    """What the page must know: the model, its config, what it was taught, and the task's bytes.

    Raises ValueError for a model whose memory the page cannot show.
    """
    from accelerated.data.recall import ALPHABET, ASK, FILLER, TELL
    from accelerated.lab import memory

    name, changes, _ = memory.ROWS[row]
    if name not in SEEN:
        raise ValueError(f"{row} is a {name}; the page shows the memories of {', '.join(SEEN)}")
    return {
        "row": row,
        "stage": stage,
        "model": name,
        "config": json.dumps(memory.SHARED | changes),
        "alphabet": bytes(ALPHABET[: memory.TOLD["pairs"] + memory.TOLD["values"]]).decode(),
        "filler": bytes(FILLER).decode(),
        "tell": chr(TELL),
        "ask": chr(ASK),
    }


def write(state: Path, row: str, stage: str) -> Path:
    """Write the file of a state_dict; returns its path. Raises ValueError if it is too large."""
    from safetensors.numpy import save

    arrays = {name: array.astype(np.float16) for name, array in read_state(state).items()}
    content = save(arrays, about(row, stage))
    if len(content) > LARGEST:
        raise ValueError(f"{state} makes {len(content):,} bytes; at most {LARGEST:,} are served")
    name = f"{row}-{stage}".lower().replace(",", "").replace(" ", "-")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.safetensors"
    path.write_bytes(content)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m docs.book.weights", description=__doc__)
    parser.add_argument("state", type=Path, metavar="STATE")
    parser.add_argument("row", metavar="ROW", help='such as "Block-Recurrent, LSTM gate"')
    parser.add_argument("stage", metavar="STAGE", help='such as "facts first"')
    print(write(**vars(parser.parse_args())))
