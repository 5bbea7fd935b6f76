"""The Compressive Transformer (Rae et al., 2019, arXiv:1911.05507) and Transformer-XL, in JAX.

It reads test vectors (parameters, a first state, three segments of tokens), computes logits,
losses, states, gradients and optimizer steps in float64, and writes them under the names that the
vectors give them. It has the chapter's method: the convolution, and attention reconstruction or
BPTT.

    python compressive_jax.py IN_FOLDER OUT_FOLDER              every *.safetensors in IN_FOLDER

Letters in shapes: B lanes, N tokens of a segment, M rows of memory, C rows of compressed memory,
K = C + M + N keys, D width, H heads of width E, F feed-forward, c compression rate, L layers,
V vocabulary. Matrices are (out, in).
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient
from safetensors import safe_open
from safetensors.numpy import save_file

jax.config.update("jax_enable_x64", True)

SEGMENTS = 3
ADAMW_STEPS = 3
# The arrays are tiny, so nearly all time is compilation: these two options of JAX 0.10 make it
# several times shorter.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def linear(x, matrix):
    """x: (..., in), matrix: (out, in) -> (..., out)"""
    return x @ matrix.T


def split_heads(x, heads):
    """x: (..., rows, H E) -> (..., H, rows, E); head h is numbers h E to (h + 1) E"""
    return x.reshape(*x.shape[:-1], heads, -1).swapaxes(-3, -2)


def heads_of(p, config, x, name):
    """x: (..., rows, D) -> (..., H, rows, E)"""
    return split_heads(linear(x, p[name]), config.heads)


def join_heads(x):
    """x: (B, H, N, E) -> (B, N, H E)"""
    batch, _, n, _ = x.shape
    return x.swapaxes(1, 2).reshape(batch, n, -1)


def layer_norm(x, scale, bias):
    """x: (B, N, D), scale, bias: (D,) -> (B, N, D)"""
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def sinusoids(distances, width):
    """distances: (K,) -> (K, D), all sines first, then all cosines"""
    angles = distances[:, None] * 10000.0 ** (-2 * np.arange(width // 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)


def relative_shift(by_distance):
    """Scores by distance, far to near, to scores by key: (B, H, N, K) -> (B, H, N, K)

    Row i moves left by N - 1 - i. What moves in from the right belongs to keys that the mask hides.
    """
    *outer, n, k = by_distance.shape
    line = jnp.pad(by_distance, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(*outer, n * (k + 1))
    return line[..., n:].reshape(*outer, n, k)


def relative_attention(p, config, h, source):
    """Causal attention by content and distance. h: (B, N, D), source: (B, K, D) -> (B, N, D)"""
    n = h.shape[1]
    k = source.shape[1]
    query = heads_of(p, config, h, "query")  # (B, H, N, E)
    key = heads_of(p, config, source, "key")  # (B, H, K, E)
    value = heads_of(p, config, source, "value")  # (B, H, K, E)

    distances = np.arange(k - 1, -1, -1)
    positions = sinusoids(distances, config.width)  # (K, D), row t is of distance K - 1 - t
    distance_key = heads_of(p, config, positions, "distance_key")  # (H, K, E)
    by_distance = query + p["distance_bias"][:, None]
    by_distance = by_distance @ distance_key.swapaxes(-1, -2)  # (B, H, N, K)
    seen = np.arange(k) <= k - n + np.arange(n)[:, None]  # (N, K), query i is key C + M + i

    by_content = (query + p["content_bias"][:, None]) @ key.swapaxes(-1, -2)
    scores = (by_content + relative_shift(by_distance)) / np.sqrt(config.head_width)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))  # (B, H, N, K)
    return linear(join_heads(weights @ value), p["output"])


def compress(p, config, evicted):
    """evicted: (B, N, D) -> (B, N/c, D), by a convolution whose stride is c"""
    end_to_end = evicted.reshape(len(evicted), -1, config.compression_rate * config.width)
    return linear(end_to_end, p["compression.weight"])


def attention_reconstruction(p, config, h, evicted, new):
    """Attention over new as over evicted. h, evicted: (B, N, D), new: (B, N/c, D) -> the loss ()"""
    p = stop_gradient(p)
    query = heads_of(p, config, stop_gradient(h), "query")  # (B, H, N, E)

    def attention_over(rows):
        """rows: (B, rows, D) -> (B, H, N, E), by content alone"""
        key = heads_of(p, config, rows, "key")
        value = heads_of(p, config, rows, "value")
        return jax.nn.softmax(query @ key.swapaxes(-1, -2) / np.sqrt(config.head_width)) @ value

    return ((attention_over(new) - attention_over(evicted)) ** 2).mean()


def remember(p, config, h, memory, compressed):
    """The two queues.

    h: (B, N, D), memory: (B, M, D), compressed: (B, C, D) -> next memory (B, M, D), next compressed
    (B, C, D), the compression's loss () or None
    """
    n = h.shape[1]
    c_rows = compressed.shape[1]
    rows = stop_gradient(jnp.concatenate([memory, h], 1))
    evicted, memory = jnp.split(rows, [n], axis=1)  # (B, N, D), (B, M, D)
    if c_rows == 0:
        return memory, compressed, None

    new = compress(p, config, evicted)  # (B, N/c, D)
    loss = None
    if config.compression_loss == "attention_reconstruction":
        loss = attention_reconstruction(p, config, h, evicted, new)
    compressed = jnp.concatenate([compressed, new], 1)[:, -c_rows:]
    if config.compression_loss != "bptt":
        compressed = stop_gradient(compressed)
    return memory, compressed, loss


def layer(p, config, h, memory, compressed):
    """h: (B, N, D), memory: (B, M, D), compressed: (B, C, D)

    -> next h (B, N, D), and what remember returns
    """
    source = jnp.concatenate([compressed, memory, h], 1)
    attended = relative_attention(p, config, h, source)
    a = layer_norm(attended + h, p["norm.scale"], p["norm.bias"])
    hidden = jax.nn.relu(linear(a, p["mlp_hidden"]) + p["mlp_hidden_bias"])  # (B, N, F)
    mlp = linear(hidden, p["mlp_output"]) + p["mlp_output_bias"]
    y = layer_norm(mlp + a, p["mlp_norm.scale"], p["mlp_norm.bias"])
    return y, *remember(p, config, h, memory, compressed)


def below(prefix, arrays):
    """{name: array} of the arrays whose names begin with a prefix, without it"""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def read_segment(params, config, state, segment):
    """state: memory (B, L, M, D), compressed (B, L, C, D)

    segment: tokens, targets, scored (B, N), starts (B,) -> the next state, and what the vectors ask
    of a segment, by name
    """
    starts = segment["starts"][:, None, None, None]
    state = {name: jnp.where(starts, 0, rows) for name, rows in state.items()}
    h = params["embedding"][segment["tokens"]]  # (B, N, D)
    states = []
    outputs = {}
    for i in range(config.layers):
        p = below(f"layers.{i}.", params)
        own = state["memory"][:, i], state["compressed"][:, i]
        h, memory, compressed, loss = layer(p, config, h, *own)
        states.append({"memory": memory, "compressed": compressed})
        if loss is not None:
            outputs[f"auxiliary.layers.{i}.compression"] = loss
    state = jax.tree.map(lambda *rows: jnp.stack(rows, 1), *states)
    outputs.update({f"next.{name}": rows for name, rows in state.items()})

    logits = linear(h, params["embedding"]) / np.sqrt(config.width)  # (B, N, V)
    log_probs = jax.nn.log_softmax(logits)
    nats = -jnp.take_along_axis(log_probs, segment["targets"][..., None], -1)[..., 0]  # (B, N)
    loss = jnp.where(segment["scored"], nats, 0).sum()
    return state, dict(outputs, logits=logits, loss=loss)


def rollout(params, state, segments, config):
    """segments: as read_segment's, stacked over segments

    -> the objective (), and the outputs, stacked over segments
    """
    _, outputs = jax.lax.scan(partial(read_segment, params, config), state, segments)
    auxiliary = sum(x.sum() for name, x in outputs.items() if name.startswith("auxiliary."))
    return outputs["loss"].sum() / segments["scored"].sum() + auxiliary / SEGMENTS, outputs


def adamw_step(params, first, second, step, state, segments, config, rates):
    """A rollout, its gradients, and a step along them

    First and second moments are like params, step counts from 1.
    """
    gradient = jax.value_and_grad(rollout, argnums=(0, 1), has_aux=True)
    (objective, outputs), (grads, grad_state) = gradient(params, state, segments, config)
    beta1 = rates["beta1"]
    beta2 = rates["beta2"]
    first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, first, grads)
    second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g**2, second, grads)

    def move(x, m, v):
        """x: a parameter, m, v: its moments -> the parameter after the step, all of one shape"""
        m = m / (1 - beta1**step)
        v = v / (1 - beta2**step)
        return x - rates["rate"] * (m / (jnp.sqrt(v) + rates["epsilon"]) + rates["decay"] * x)

    params = jax.tree.map(move, params, first, second)
    return params, first, second, (objective, outputs, grads, grad_state)


def run_case(path):
    """-> everything that the vectors at path ask for, by name, in float64"""
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    config = SimpleNamespace(**json.loads(metadata["config"]))
    rates = json.loads(metadata["steps"])
    params = below("given/param/", tensors)
    segments = {}
    for name in ("tokens", "targets", "scored", "starts"):
        segments[name] = np.stack([tensors[f"given/{k}/{name}"] for k in range(SEGMENTS)])
    batch = segments["tokens"].shape[1]
    nothing = np.zeros((batch, config.layers, 0, config.width))  # a memory without rows
    state = {name: tensors.get(f"given/state/{name}", nothing) for name in ("memory", "compressed")}

    step = partial(adamw_step, config=config, rates=rates["adamw"])
    step = jax.jit(step, compiler_options=COMPILER_OPTIONS)
    zeros = {name: np.zeros_like(x) for name, x in params.items()}  # both moments before a step
    *moved, first_rollout = step(params, zeros, zeros, 1, state, segments)
    for i in range(2, ADAMW_STEPS + 1):
        *moved, _ = step(*moved, i, state, segments)
    moved, (objective, outputs, grads, grad_state) = jax.device_get((moved[0], first_rollout))

    results = {"objective": objective}
    for name, x in outputs.items():
        results |= {f"{k}/{name}": x[k] for k in range(SEGMENTS)}
    for name, x in params.items():
        results[f"grad/{name}"] = grads[name]
        results[f"sgd/{name}"] = x - rates["sgd"]["rate"] * grads[name]
        results[f"adamw/{name}"] = moved[name]
    results |= {f"grad_state/{name}": x for name, x in grad_state.items()}
    asked = [name for name in tensors if name in results]
    return {name: np.array(results[name], np.float64, order="C") for name in asked}


def main(given, written):
    """Run all cases of a folder."""
    Path(written).mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(given).glob("*.safetensors")):
        save_file(run_case(path), Path(written) / path.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
