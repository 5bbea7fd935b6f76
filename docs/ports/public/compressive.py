"""compressive-transformer-pytorch beside ours: python -m docs.ports.public.compressive"""

import sys
from types import SimpleNamespace

import numpy as np
import torch

from docs.ports.public import walk
from reference import compressive as ours

LAYER = "attn_layers.0.fn.fn."
ONE_LAYER = SimpleNamespace(heads=8, compression_loss="attention_reconstruction")
OPTIONS = {"num_tokens": 11, "dim": 16, "seq_len": 4, "mem_len": 8, "cmem_len": 4}


def steps():
    """(name, theirs, ours) of one layer's last segment, of its first, and of five rows."""
    from compressive_transformer_pytorch import CompressiveTransformer

    plain = {"gru_gated_residual": False, "enhanced_recurrence": False}
    model = CompressiveTransformer(depth=1, cmem_ratio=2, **OPTIONS, **plain)
    torch.nn.init.normal_(model.pos_emb)  # it starts at zero
    p = walk.parameters(model)
    tokens = torch.randint(11, (2, 20))
    memory = None
    for segment in tokens.split(4, dim=1):
        before = memory
        with walk.Calls() as calls:
            _, memory, _ = model.eval()(segment, before)
        if before is None:
            first = calls.outputs
    last = calls.outputs
    embedded = p["token_emb.weight"][segment]
    yield "query", last["linear"][0], embedded @ p[LAYER + "to_q.weight"].T
    yield "weights", last["softmax"][0], attention(last["linear"], p["pos_emb"])

    held = before.mem[0].numpy()
    new = compressed(p, held[:, :4], 2)
    yield "new", memory.compressed_mem[0, :, -2:], new
    loss = model.train()(segment, before)[2]
    key_value = p[LAYER + "to_kv.weight"]
    matrices = {"query": p[LAYER + "to_q.weight"], "key": key_value[:16], "value": key_value[16:]}
    for name, rows in (("auxiliary", held[:, :4]), ("auxiliary, over all memory", held)):
        expected, _ = ours.attention_reconstruction_forward(
            matrices, ONE_LAYER, last["layer_norm"][0], rows, new
        )
        yield name, loss, expected
    projection = model.attn_layers[0].fn.fn.to_kv.weight
    yield "trained after an auxiliary loss", projection.requires_grad + 0, 1

    for name, rows in (("weights of the first segment", -4), ("..., by rows 0 to 3", 0)):
        table = np.roll(p["pos_emb"], -rows, axis=1)[:, :4]
        yield name, first["softmax"][0], attention(first["linear"], table)

    uneven = OPTIONS | {"seq_len": 5, "mem_len": 5}
    model = CompressiveTransformer(depth=1, **uneven).eval()
    p = walk.parameters(model)
    full = model(tokens[:, :5])[1]
    after = model(tokens[:, 5:10], full)[1]
    new = compressed(p, full.mem[0, :, :4].numpy(), 4)
    yield "new of five rows", after.compressed_mem[0], new


def attention(linear, rows):
    """The weights of our relative attention, by the package's projections."""
    query = ours.split_heads(linear[0], 8)
    none = np.zeros((8, 2))  # it has no biases u and v
    _, weights, _ = ours.relative_attention_forward(
        query, *walk.halves(linear[1]), rows, none, none
    )
    return weights


def compressed(p, rows, rate):
    """Our convolution of rows (B, N, D) by the package's weight."""
    weight = p[LAYER + "compress_mem_fn.conv.weight"].swapaxes(1, 2).reshape(16, -1)
    return ours.conv_forward(
        {"weight": weight}, SimpleNamespace(compression_rate=rate), rows, None
    )[0]


if __name__ == "__main__":
    sys.exit(walk.main("compressive-transformer-pytorch", "0.4.0", steps))
