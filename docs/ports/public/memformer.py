"""memformer beside ours: python -m docs.ports.public.memformer"""

import sys

import numpy as np
import torch

from docs.ports.public import walk
from reference import memformer as ours
from reference.block_recurrent import position_bucket

SIZES = {"dim": 16, "num_memory_slots": 3, "enc_num_tokens": 11, "dec_num_tokens": 11}


def steps():
    """(name, theirs, ours) of a layer of the encoder, both positions, the writer, a replay."""
    from memformer import Memformer
    from memformer.mrbp import memory_replay_backprop

    lengths = {"enc_max_seq_len": 5, "dec_max_seq_len": 5}
    model = Memformer(enc_depth=1, dec_depth=1, **SIZES, **lengths)
    p = walk.parameters(model)
    tokens = torch.randint(11, (2, 15))
    target = torch.randint(11, (2, 6))
    with walk.Calls() as calls:
        model(tokens[:, :5], target)
    linear = calls.outputs["linear"]

    query = ours.split_heads(linear[0], 8)
    key, _ = walk.halves(linear[1])
    by_content = query @ key.swapaxes(2, 3) / 2**0.5  # Eqs. 2-3 without R, which is not there
    yield "weights", calls.outputs["softmax"][0], ours.softmax_forward(by_content)[0]
    distance = np.arange(12)[:, None] - np.arange(12)
    both_sides = position_bucket(abs(distance), 16, 128) + 16 * (distance < 0)
    causal = position_bucket(distance, 32, 128)
    for name, part, bucket in (
        ("encoder", model.encoder, both_sides),
        ("decoder", model.decoder.net, causal),
    ):
        positions = part.layer_blocks.rel_pos_emb
        table = positions.relative_attention_bias.weight.numpy().T
        bias = positions(12, 12)[0].numpy()
        seen = (bucket == both_sides) | (distance >= 0)
        yield f"position_bias of the {name}", bias * seen, table[:, bucket] * seen

    alone = model(tokens[:, :5], src_mask=torch.zeros(2, 5).bool())[1]
    yield "new_slots, each alone", alone, np.stack([p["memory_slots"]] * 2)

    with torch.enable_grad():
        memory_replay_backprop(model, tokens, target)
        replayed = model.memory_slots.grad
        model.zero_grad()
        memory = None
        for at in (0, 5):
            memory = model(tokens[:, at : at + 5], mems=memory).mem
        model(tokens[:, 10:], target, mems=memory).dec_out.backward()
    yield "grad/memory_slots by replay", replayed, model.memory_slots.grad


if __name__ == "__main__":
    sys.exit(walk.main("memformer", "0.3.1", steps))
