"""Opens a run's exported folder in the package transformers; eval.py export copies this file there.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The model is computed by the project that wrote the folder, whose package `accelerated` must be on
the path.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

try:  # transformers would name a package of the registry, which is another
    import accelerated
    from accelerated.generation.continuation import Sampling, continue_text
except ImportError as error:
    raise ImportError("this folder needs a clone of Palimpsest on PYTHONPATH") from error


class PalimpsestConfig(PretrainedConfig):
    """What the folder's config.json holds."""

    model_type = "palimpsest"


@dataclass
class SegmentOutput(ModelOutput):
    """The logits (B, n, V), and the state after whole segments, else None."""

    logits: Tensor | None = None
    state: tuple[Tensor, ...] | None = None


class Palimpsest(PreTrainedModel):
    """A long-memory model of any kind: it reads texts of any length, segment by segment."""

    config_class = PalimpsestConfig

    def __init__(self, config: PalimpsestConfig, model: Any):
        super().__init__(config)
        self.model = model

    @classmethod
    def from_pretrained(cls, folder: str, *, config: Any = None, **_: Any) -> "Palimpsest":
        """Open the folder, as accelerated.load does: on a CPU, in the run's own type."""
        config = config or PalimpsestConfig.from_pretrained(folder)
        return cls(config, accelerated.load(folder).model).eval()

    def forward(self, input_ids: Tensor, state: Any = None) -> SegmentOutput:
        """Read input_ids (B, n) after `state`, or from a document's start.

        If windows overlap, they begin with the last o tokens that the state has read. The state is
        None if the last segment is not whole: memory changes at its end alone.
        """
        segment = self.model.config.segment
        overlap = getattr(self.model.config, "overlap", 0)
        missing = 0
        rows = []
        if state is None:
            state = self.model.initial_state(len(input_ids))
        for start in range(0, max(1, input_ids.shape[1] - overlap), segment - overlap):
            tokens = input_ids[:, start : start + segment]
            missing = segment - tokens.shape[1]
            logits, state, _ = self.model(functional.pad(tokens, (0, missing)), state)
            first = overlap if start > 0 else 0  # rows that the previous window has predicted
            rows.append(logits[:, first : tokens.shape[1]])
        return SegmentOutput(torch.cat(rows, 1), None if missing else state)

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> Tensor:
        """Continue input_ids (B, n); returns (B, n + max_new_tokens), with input_ids first.

        Decodes greedily unless do_sample, which temperature and top_p need.
        """
        sampling = Sampling(temperature if do_sample else 0.0, top_p)
        drawn = continue_text(self.model, input_ids, max_new_tokens, sampling, None)
        return torch.cat([input_ids, torch.stack(list(drawn), 1)], 1)
