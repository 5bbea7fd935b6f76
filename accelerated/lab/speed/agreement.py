"""Whether a device computes what the CPU does in float64: every attention and every model, with the one table of tolerances."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from accelerated.attention import content, relative_shift, retrieval, signed_distance, sliding_window
from accelerated.attention.heads import at_least_float32
from accelerated.evaluation.generation import step_of
from accelerated.evaluation.score import evaluating
from accelerated.models import model_class
from accelerated.protocol import computing_in

# relative error of outputs and gradients, by device and dtype; the comment is the worst error measured
TOLERANCE = {
    ("cpu", torch.float64): 1e-12,  # 1e-15
    ("cpu", torch.float32): 2e-5,  # 2e-6
    ("cpu", torch.bfloat16): 3e-2,  # 2.6e-2
    ("cuda", torch.float32): 1e-4,
    ("cuda", torch.bfloat16): 3e-2,
}
COMPILED_FLEX = torch.compile(sliding_window.sliding_attention_flex)
DIRECTION = 1e-3  # 1 - cosine of all gradients of a model together, in bfloat16; 1.1e-4
SMALL = {  # to compare with the CPU; in larger ones a rounding error may cross a ReLU's kink
    "block_recurrent": {"width": 128, "layers": 2, "heads": 2, "feed_forward": 256, "window": 32, "segment": 128, "states": 32,
                        "recurrent_layers": (2,)},
    "compressive": {"width": 128, "layers": 2, "heads": 2, "feed_forward": 256, "segment": 64, "memory": 64,
                    "compressed_memory": 32},
    "memformer": {"width": 128, "encoder_layers": 1, "decoder_layers": 2, "heads": 2, "feed_forward": 256},
    "memorizing": {"width": 128, "layers": 2, "heads": 2, "feed_forward": 256, "segment": 32, "memory_layer": 2, "memory": 48},
    "pretrained_recurrence": {"width": 128, "layers": 3, "heads": 2, "feed_forward": 256},
}  # fmt: skip


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest difference divided by the largest expected magnitude; infinite if anything is NaN or infinite."""
    expected, actual = expected.detach().cpu().double(), actual.detach().cpu().double()
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return error if math.isfinite(error) else math.inf


def outputs_and_gradients(function: Callable, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The output of a function and the gradients of its inputs, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = function(*leaves.values())
    (out * torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape)).sum().backward()
    return {"output": out} | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}


def compiled_flex(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """sliding_attention_flex, compiled, because only then is it fast."""
    blocks = sliding_window.visible_blocks(query.shape[2], offset.shape[1], query.device)
    return COMPILED_FLEX(query, keys, values, offset, blocks)


LOOKUPS = (retrieval.retrieval_attention_plain, retrieval.retrieval_attention)


def looked_up(attend: Callable, keys: torch.Tensor, values: torch.Tensor) -> Callable:
    """attend to a memory (B, H, M, E) whose last 8 keys are the nearest in any precision, as a function of query and scale."""
    keys = torch.cat([-keys[:, :, 8:].abs(), keys[:, :, :8].abs()], 2)
    return lambda query, scale: attend(query.abs(), retrieval.searchable(keys.to(query), values.to(query)), scale, 8)


def attentions(device: torch.device) -> dict[str, tuple[Callable, Callable, dict]]:
    """{name: (plain path, fastest path for a device, inputs in float32)}."""
    b, h, n, e, w = 2, 3, 128, 64, 32
    distances = signed_distance.distance_index(n, 1 - n, n - 1)
    mask = sliding_window.window_mask(sliding_window.tile_distance(w), w)

    def drawn(**shapes):
        generator = torch.Generator().manual_seed(0)
        rows = {name: torch.randn(shape, generator=generator, dtype=torch.float32) for name, shape in shapes.items()}
        scored = ("query", "key", "keys", "distance_key")  # made small: scores are then of size 1
        return {name: x * e**-0.25 if name in scored else x for name, x in rows.items()}

    def by_distance(rows, keys):
        biases = {"content_bias": (h, e), "distance_bias": (h, e)}
        return drawn(query=(b, h, n, e), key=(b, h, keys, e), value=(b, h, keys, e), distance_key=(h, rows, e), **biases)

    def placed(function):
        return lambda *inputs: function(*inputs, distances.to(inputs[0].device))

    window = drawn(query=(b, h, n, e), keys=(b, h, w + n, e), values=(b, h, w + n, e), offset=(h, w, 2 * w))
    window["offset"].masked_fill_(~mask, -math.inf)
    same, tiles = drawn(query=(b, h, n, e), key=(b, h, n, e), value=(b, h, n, e)), (b, h, 4, w, e)
    cases = {
        "sliding window": (sliding_window.sliding_attention_plain, sliding_window.sliding_attention, window),
        "relative shift": (
            lambda *x: relative_shift.relative_attention_plain(*x)[0], lambda *x: relative_shift.relative_attention(*x)[0],
            by_distance(n + w, n + w),
        ),
        "Transformer-XL's, signed": (
            placed(signed_distance.transformer_xl_attention_plain), placed(signed_distance.transformer_xl_attention),
            by_distance(2 * n - 1, n),
        ),
        "causal": (
            lambda *x: content.content_attention_plain(*x, causal=True), lambda *x: content.content_attention(*x, causal=True),
            same,
        ),
        "by content": (content.content_attention_plain, content.content_attention, same),
        "tokens to states": (
            content.scaled_attention_plain, content.scaled_attention, drawn(query=tiles, key=tiles, value=tiles, scale=(h, 1)),
        ),
        "nearest keys": (
            *(looked_up(attend, **drawn(keys=(b, h, 200, e), values=(b, h, 200, e))) for attend in LOOKUPS),
            drawn(query=(b, h, n, e), scale=(h,)),
        ),
    }  # fmt: skip
    flex = (sliding_window.sliding_attention_plain, compiled_flex, window)
    return cases if device.type == "cpu" else cases | {"sliding window, flex": flex}  # on a CPU it has no backward pass


def model_results(model: str, config: Any, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What two segments give: logits and next state of the second, gradients, and logits token by token (generation)."""
    network = model_class(model)(config).to(device, torch.promote_types(dtype, torch.float32))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (2, 2, config.segment), generator=generator).to(device)
    with computing_in(network, dtype):
        first = network(tokens[0], network.initial_state(2))
        second = network(tokens[1], first.state)
        loss = functional.cross_entropy(at_least_float32(second.logits).flatten(0, 1), tokens[1].flatten())
        (loss + sum(first.auxiliary.values())).backward()
        found = {"logits": second.logits} | {f"state: {k}": x for k, x in second.state._asdict().items() if x.numel()}
        with evaluating(network), torch.no_grad():
            stream, step, stepped = network.advance(tokens[0], network.initial_state(2)), step_of(network), []
            for token in tokens[1, :, :32].unbind(1):
                logits, stream = step(token, stream)
                stepped.append(logits)
    gradients = torch.cat([p.grad.double().flatten().cpu() for p in network.parameters() if p.grad is not None])
    return found | {"gradients": gradients, "generation": torch.stack(stepped, 1)}


def errors_of_attention(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """(what, its relative error, allowed) of an attention's output and, as one row, of its gradients."""
    plain, fastest, inputs = attentions(device)[name]
    expected = outputs_and_gradients(plain, {key: x.double() for key, x in inputs.items()})
    actual = outputs_and_gradients(fastest, {key: x.to(device, dtype) for key, x in inputs.items()})
    errors = {key: relative_error(x, actual[key]) for key, x in expected.items()}
    yield "output", errors.pop("output"), TOLERANCE["cuda", dtype]
    yield "gradients", max(errors.values()), TOLERANCE["cuda", dtype]


def errors_of_model(model: str, config: Any, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """(what, its error, allowed) of a model. In bfloat16 a gradient is held by its direction: ReLUs near zero flip."""
    expected, actual = (
        model_results(model, config, torch.device("cpu"), torch.float64),
        model_results(model, config, device, dtype),
    )
    gradients = [found.pop("gradients") for found in (expected, actual)]
    for key, x in expected.items():
        yield key, relative_error(x, actual[key]), TOLERANCE["cuda", dtype]
    if dtype == torch.bfloat16:
        yield "gradients, 1 - cosine", 1 - functional.cosine_similarity(*gradients, dim=0).item(), DIRECTION
    else:
        yield "gradients", relative_error(*gradients), TOLERANCE["cuda", dtype]
