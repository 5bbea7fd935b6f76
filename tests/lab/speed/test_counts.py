"""What a training step at the papers' sizes costs on a GPU, counted on meta tensors: it must not grow."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelerated.lab.speed import __main__ as bench
from accelerated.lab.speed import counts
from accelerated.lab.speed.variants import model_on_meta, paper_settings
from accelerated.models import presets_of
from accelerated.protocol import computing_in
from tests.helpers.variants import ONE_OF_EACH, PAPERS, over, variant

# kernels, saved MB and moved GB of one segment of a lane, forward and backward in bfloat16 with dropout, from above
MOST = {
    "block_recurrent": (1200, 2300, 35.2),
    "compressive": (1560, 1450, 23.2),
    "memformer": (1180, 68.5, 3.2),  # of the megabytes 32 are joined weights, however many lanes
    "memorizing": (680, 590, 10.2),
    "pretrained_recurrence": (550, 206, 4.9),
}


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("model", MOST)
def test_a_step_costs_no_more(model):
    found = counts.counted(counts.meta_step(model, paper_settings(model)[0], 1))
    kernels, megabytes, gigabytes = MOST[model]
    assert len(found.names) <= kernels and found.saved_bytes <= 1e6 * megabytes and found.moved_bytes <= 1e9 * gigabytes
    assert 0 < found.casts < len(found.names) / 10 and found.saved_bytes < found.peak


def test_what_is_counted():
    """One product, two casts, a view and an allocation: three kernels; the product saves the copies."""
    x, y = (torch.empty(4, 8, device="meta", requires_grad=True) for _ in range(2))
    with counts.Dispatched() as found, torch.autograd.graph.saved_tensors_hooks(found.keep, lambda tensor: tensor):
        low = y.to(torch.bfloat16)  # reads 128 bytes, writes 64
        out = x.to(torch.bfloat16) @ low.T  # (4, 4), FLOPs 2 * 4 * 4 * 8
        torch.empty_like(out)
    assert found.names == ["_to_copy.default", "_to_copy.default", "mm.default"] and found.casts == 2
    assert found.saved_bytes == 128 and found.flops == 256 and found.moved_bytes == 2 * (128 + 64) + (64 + 64 + 32)
    assert found.live == 64 + 64 + 32 and found.peak == 64 + 64 + 32 + 32  # the copies, out, what is like it
    del out
    assert found.live == 64
    with counts.Dispatched() as found:  # what is added to an older tensor takes no memory
        x.data.add_(1)
        newer = torch.empty(10, device="meta").add_(1)
    assert found.live == found.peak == 4 * len(newer)


def test_memory_of_a_preset():
    """Fewer lanes at once take less, in proportion; the optimiser's state is its own."""
    name = "pretrained_recurrence"
    config, training = paper_settings(name)
    config, training = dataclasses.replace(config, layers=2), dataclasses.replace(training, horizon=1, dtype="bfloat16")
    parameters = sum(p.numel() for p in model_on_meta(name, config).parameters())
    state = training.batch * (2 * config.width + 1)  # in bfloat16, and a boolean

    def memory(**changes):
        return counts.training_bytes(name, config, dataclasses.replace(training, **changes))

    held, whole = memory()
    recomputed, exact = memory(checkpoint_layers=True), memory(dtype="float32")
    assert held == recomputed[0] == 16 * parameters + state == exact[0] - training.batch * 2 * config.width
    assert whole > 1.4 * memory(accumulate=2)[1] and recomputed[1] < 0.95 * whole
    assert memory(horizon=104)[1] == memory(horizon=4)[1] + 100 * state
    assert whole < exact[1] < 1.05 * whole, "this small, copies take almost as much as they save"
    assert held - 8 * parameters < memory(optimizer="adafactor")[0] < held - 7.9 * parameters


def test_the_tables(monkeypatch, capsys):
    """A row for each model and its scores written out, which takes more kernels, and for each preset."""
    small = {name: (PAPERS[name].small, dataclasses.replace(paper_settings(name)[1], horizon=1)) for name in PAPERS}
    monkeypatch.setattr(counts, "paper_settings", lambda model, preset=None: small[model])
    monkeypatch.setattr(counts, "NAMES", ["memorizing"])
    facts = presets_of("memorizing").SPEED | {"segments": 1, "presets": ["a preset"]}
    monkeypatch.setattr(presets_of("memorizing"), "SPEED", facts)
    bench.main(["counts"])
    lines = [line[2:].split(" | ") for line in capsys.readouterr().out.splitlines() if line[2:3].isalpha()]
    _, [model, fused, *_], [plain_name, plain, *_], _, [preset, *_] = lines
    assert (model, plain_name, preset) == ("memorizing", "its scores written out", "memorizing a preset")
    assert int(plain) > int(fused)


class OnMeta(TorchDispatchMode):
    """Refuses tensors on a CPU inside."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        for tensor in tree_leaves((arguments, out)):
            assert not isinstance(tensor, torch.Tensor) or tensor.is_meta, f"{function} has a tensor on {tensor.device}"
        return out


@over([*ONE_OF_EACH, ("block_recurrent", "fixed-skip-feedback"), ("compressive", "most_used-none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_no_tensor_is_made_on_the_cpu(paper, name, dtype):
    """Forward and backward with dropout on another device, through the next state too."""
    config = dataclasses.replace(variant(paper, name), dropout=0.3)
    model = model_on_meta(paper, config)
    tokens = torch.empty(2, config.segment, dtype=torch.long, device="meta")
    with OnMeta(), computing_in(model, dtype):
        first = model(tokens, model.initial_state(2))
        second = model(tokens, first.state)
        fields = [field.sum() for field in second.state if field.is_floating_point() and field.requires_grad]
        (second.logits.float().sum() + sum(second.auxiliary.values()) + sum(fields)).backward()
        model.advance(tokens, first.state)
    assert second.logits.dtype == dtype and any(p.grad is not None for p in model.parameters())
    assert all(p.grad is None or p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())
