"""eval.py export --program: a run as a program of torch.export, which needs torch alone.

program.pt2 maps tokens (B, N) and the state's fields to logits (B, N, V) and the next fields, for
any B. initial_state.safetensors has the fields at a document's start, for one lane.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerated.program.files import written_whole
from accelerated.protocol import Model, State, repeat_lane

PROGRAM = "program.pt2"
INITIAL = "initial_state.safetensors"
USE = """
{program} needs only torch, and reads any number of lanes, texts side by side:

```python
import torch
from safetensors.torch import load_file

program = torch.export.load("{program}").module()
initial = load_file("{initial}")
state = [torch.cat([initial[name]] * lanes) for name in {names}]
for segment in tokens.split({length}, dim=1):  # tokens (lanes, n), int64; a segment is {length}
    logits, *state = program(segment, *state)
```
"""


class Program(nn.Module):
    """A model whose state goes in and comes out as plain tensors, in the order of its fields."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, *fields: Tensor) -> tuple[Tensor, ...]:
        """The logits (B, N, V) of tokens (B, N), and the next state's fields."""
        state = self.model.state_type._make(fields)
        logits, after, _ = self.model(tokens, state)
        return logits, *after


@torch.no_grad()
def exported_program(model: Model) -> torch.export.ExportedProgram:
    """The model, in evaluation mode and on a CPU, as a program for any number of lanes."""
    lanes = torch.export.Dim("lanes", min=1)
    state = initial_lane(model, lanes=2)
    tokens = torch.zeros(2, model.config.segment, dtype=torch.long)
    axes = {"tokens": {0: lanes}, "fields": tuple({0: lanes} for _ in state)}
    return torch.export.export(Program(model), (tokens, *state), dynamic_shapes=axes, strict=False)


def initial_lane(model: Model, lanes: int = 1) -> State:
    """The state at a document's start, in memory of its own."""
    return repeat_lane(model.initial_state(1), lanes)


def write_program(model: Model, folder: Path, safetensors: Any, advice: str) -> str:
    """Write both files, and return what README.md says of them."""
    with written_whole(folder / PROGRAM, advice) as path, open(path, "wb") as file:
        torch.export.save(exported_program(model), file)
    names = tuple(model.state_shapes(1))
    initial = dict(zip(names, initial_lane(model), strict=True))
    with written_whole(folder / INITIAL, advice) as path:
        path.write_bytes(safetensors.save(initial))
    length = model.config.segment
    return USE.format(program=PROGRAM, initial=INITIAL, names=names, length=length)
