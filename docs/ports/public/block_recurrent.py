"""block-recurrent-transformer-pytorch beside ours: python -m docs.ports.public.block_recurrent"""

import sys

import numpy as np
import torch

from docs.ports.public import walk
from reference import block_recurrent as ours

MEANT = 8  # its qk_rmsnorm_scale
USED = 64**-0.5  # 1 / sqrt(E): what it multiplies the scores of unit queries and keys by


def steps():
    """(name, theirs, ours) of a document's second block, in one recurrent layer."""
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    model = BlockRecurrentTransformer(
        num_tokens=11, dim=12, depth=1, block_width=4, max_seq_len=8, recurrent_layers=(1,)
    )
    p = walk.parameters(model)
    tokens = torch.randint(11, (2, 8))
    with walk.Calls() as calls:
        logits, _, _ = model(tokens)
        _, (short,), _ = model(tokens[:, :6], return_memories_and_states=True)
    linear, norm, softmax = (calls.outputs[name] for name in ("linear", "layer_norm", "softmax"))
    einsum = calls.outputs["einsum"][1:]  # the first is rotary's

    key, value = np.split(np.concatenate([linear[1], linear[12]], axis=1), 2, axis=-1)
    every_key, every_value = (np.repeat(rows[:, None], 8, axis=1) for rows in (key, value))
    yield "key", key, every_key
    unit_key = ours.unit_norm_forward(every_key)[0]
    yield "similarity", einsum[8], unit(linear[11]) @ unit_key.swapaxes(2, 3)
    seen = np.where(ours.tile_mask(4), USED * einsum[8], -np.inf)
    yield "weights", softmax[4], ours.softmax_forward(seen)[0]

    yield "read_weights", softmax[5], ours.softmax_forward(MEANT * einsum[10])[0]
    scale = np.full(8, USED)
    for name, first in (("states_from_tokens", 0), ("states_from_tokens, own block", 4)):
        kept = (rows[:, :, first:] for rows in (unit_key, every_value))
        yield name, einsum[15], ours.attention_forward(unit(linear[15]), *kept, scale)[0]

    yield "logits", logits, norm[6] @ p["token_emb.weight"].T / 12**0.5
    yield "keys after a short block", short[0], key[:, 2:6]


def unit(projected):
    """Queries (B, H, N, E) of unit length."""
    return ours.unit_norm_forward(ours.split_heads(projected, 8))[0]


if __name__ == "__main__":
    sys.exit(walk.main("block-recurrent-transformer-pytorch", "0.4.4", steps))
