"""A checkpoint's fields without contents, for tests of what reads checkpoints."""

import math

import torch

EMPTY_CHECKPOINT = {
    "model": "compressive",
    "model_config": {},
    "training_config": {},
    "data_config": {},
    "parameters": {},
    "optimizer": {},
    "state": (),
    "lanes": {},
    "random": torch.zeros(1),
    "step": 1,
    "corpus": "",
    "tokenizer": "",
    "best": math.inf,
    "pending": (0.0, 0, 0),
    "validation_due": False,
}
