"""labml-nn's Compressive Transformer and Transformer-XL: python -m docs.ports.public.labml"""

import sys
from types import SimpleNamespace

import numpy as np
import torch

from docs.ports.public import walk
from reference import compressive as ours

CONFIG = SimpleNamespace(heads=8, compression_rate=2, compression_loss="attention_reconstruction")
LAYER = "layers.0.self_attn."


def steps():
    """(name, theirs, ours) of a layer; without compressed memory it is their Transformer-XL's."""
    from labml_nn.transformers import compressive, xl
    from labml_nn.transformers.feed_forward import FeedForward

    parts = {
        "d_model": 16,
        "self_attn": xl.RelativeMultiHeadAttention(8, 16, 0),
        "feed_forward": FeedForward(16, 20, 0),
        "dropout_prob": 0,
    }
    for name in ("key_pos_embeddings", "query_pos_bias"):
        torch.nn.init.normal_(getattr(parts["self_attn"], name))  # they start at zero
    convolution = compressive.Conv1dCompression(2, 16)
    layer = compressive.CompressiveTransformerLayer(compress=convolution, **parts)
    x, memory, older = (torch.randn(rows, 2, 16) for rows in (4, 6, 3))
    plain = xl.TransformerXL(xl.TransformerXLLayer(**parts), 1)
    full = compressive.CompressiveTransformer(layer, 1)
    for name, model, rest in (("Transformer-XL", plain, ()), ("Compressive", full, ([older],))):
        p = walk.parameters(model)
        length = 13 if rest else 10
        mask = torch.ones(4, length).tril(length - 4)[..., None]
        with walk.Calls() as calls:
            out, kept = model(x, [memory], *rest, mask)
        linear = calls.outputs["linear"]
        rows = x.numpy()
        yield f"query, {name}", linear[0], rows @ p[LAYER + "query.linear.weight"].T

        by_head = (ours.split_heads(projected.swapaxes(0, 1), 8) for projected in linear[:3])
        first = 4097 - length  # row 4,096 is of distance 0, row 4,096 - d of distance d
        table = p[LAYER + "key_pos_embeddings"][first:4097].swapaxes(0, 1)
        biases = (p[LAYER + "query_pos_bias"], np.zeros((8, 2)))
        _, own, _ = ours.relative_attention_forward(*by_head, table, *biases)
        weights = calls.outputs["softmax"][0].transpose(2, 3, 0, 1)
        yield f"weights, {name}", weights, own
        yield f"output, {name}", out, rows + linear[3] + linear[5]

    evicted = memory[:4].numpy().swapaxes(0, 1)
    weight = p["layers.0.compress.conv.weight"].swapaxes(1, 2).reshape(16, -1)
    new, _ = ours.conv_forward({"weight": weight}, CONFIG, evicted, None)
    theirs = full.layers[0].compress(memory[:4]).swapaxes(0, 1)
    yield "new", theirs, new
    with walk.Calls() as calls:
        loss = compressive.AttentionReconstructionLoss(full.layers)(kept, [memory[:4]])
    matrices = {name: p[f"{LAYER}{name}.linear.weight"] for name in ("query", "key", "value")}
    normed = (rows.swapaxes(0, 1) for rows in calls.outputs["layer_norm"])  # h, evicted, new
    expected, _ = ours.attention_reconstruction_forward(matrices, CONFIG, *normed)
    yield "auxiliary", loss, expected


if __name__ == "__main__":
    sys.exit(walk.main("labml-nn", "0.5.1", steps))
