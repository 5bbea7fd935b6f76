"""memorizing-transformers-pytorch beside ours: python -m docs.ports.public.memorizing"""

import sys
import tempfile

import numpy as np
import torch

from docs.ports.public import walk
from reference import memorizing as ours


def steps():
    """(name, theirs, ours) of one layer that looks up its memory, and of the memory itself."""
    from memorizing_transformers_pytorch import KNNMemory, MemorizingTransformer

    folder = tempfile.mkdtemp()
    lengths = {"num_retrieved_memories": 2, "xl_max_memories": 4, "memorizing_layers": 1}
    options = {"knn_memories_directory": folder, "clear_memories_on_eos_token_id": 1}
    model = MemorizingTransformer(num_tokens=11, dim=12, depth=1, **lengths, **options)
    tokens = torch.randint(2, 11, (2, 12))
    tokens[:, -1] = 1  # the document ends
    near = None
    with model.knn_memories_context(batch_size=2) as memories:
        for segment in tokens.split(4, dim=1):
            with walk.Calls() as calls:
                _, near = model(segment, memories, xl_memories=near)
        left = memories[0].knns[0].index.ntotal
    einsum = calls.outputs["einsum"]

    key, _ = np.split(calls.outputs["linear"][1], 2, axis=-1)
    yield "key", key, np.repeat(key[:, None], 8, axis=1)
    positions = model.knn_rel_pos_bias
    table = positions.relative_attention_bias.weight.numpy().T * positions.scale
    distance = ours.tile_distance(4)
    for name, seen in (("position_bias without a cache", 4), ("position_bias", 8)):
        bias = positions(4, seen, device="cpu")[0].numpy()
        expected = table[:, ours.position_bucket(distance[:, -seen:], 32, 128)]
        yield name, np.tril(bias, seen - 4), np.tril(expected, seen - 4)

    weights = calls.outputs["softmax"][0]  # of two keys that are found, then of eight that are near
    share = weights[..., :2].sum(-1, keepdims=True)  # of what is found
    mixed, _ = ours.memory_gate_forward(einsum[2] / (1 - share), einsum[3] / share, np.zeros(8))
    yield "mixed", einsum[2] + einsum[3], mixed
    yield "memory after a document's end", left, 0

    memory = KNNMemory(6, 8, memmap_filename=f"{folder}/full", multiprocessing=False)
    rows = torch.nn.functional.normalize(torch.randn(1, 12, 2, 6), dim=-1)
    names = {6: "nearest key", 12: "nearest key once memory was full"}
    for at in (3, 6, 9, 12):
        memory.add(rows[:, at - 3 : at])
        if at in names:
            asked = rows[:, at - 3 : at, 0]  # keys in memory: the nearest are they themselves
            yield names[at], memory.search(asked, 1)[0][:, :, 0, 0], asked


if __name__ == "__main__":
    sys.exit(walk.main("memorizing-transformers-pytorch", "0.4.1", steps))
