"""A GPU's kernels equal attention and a loss written out.

On a CPU they run by Triton's interpreter, in a process of its own, as Triton decides when it is
imported; on a GPU as they are.
"""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

INTERPRETED = "TRITON_INTERPRET"
ON_A_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_A_GPU else "cpu")
TOLERANCE = 5e-3 if ON_A_GPU else 2e-6  # relative norm, in bfloat16 or float32
DTYPE = torch.bfloat16 if ON_A_GPU else torch.float32
SCALE = 0.3
IGNORED = -100

# Lanes, heads, queries, keys, width, columns and shift; split and skip if the first keys have
# columns of their own; a table for all queries if shift is 0
LISTED = """
    one tile:                            1   2  16  24  16   8   0   0   0
    a sliding window:                    2   3  40  64  16  24   0   0   0
    whole tiles of a window:             1   2 192 256  16  64   0   0   0
    a window of one:                     1   1  35  36  16   1   0   0   0
    the last key in a tile of its own:   1   1  64  98  16  34   0   0   0
    causal with memory:                  2   2  40 112  16 112  39   0   0
    whole tiles, causal:                 1   1 160 480  16 480 159   0   0
    causal without memory:               1   2  33  33  32  33  32   0   0
    distances of the first keys' own:    2   2  40 112  16 152  39  50  40
    whole tiles, own distances:          1   1  64 192  16 256  63  64  64
"""
CASES = {}
for row in LISTED.strip().splitlines():
    name, numbers = row.split(":")
    CASES[name.strip()] = [*map(int, numbers.split())]


@pytest.fixture(autouse=True)
def new_memory_is_nan():
    """What a kernel should have written, and did not, is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not initialised
    yield
    torch.use_deterministic_algorithms(False)


needs_kernels = pytest.mark.skipif(
    not ON_A_GPU and not os.environ.get(INTERPRETED),
    reason=f"runs with {INTERPRETED}=1: see test_kernels_by_the_interpreter",
)


@pytest.mark.skipif(ON_A_GPU or bool(os.environ.get(INTERPRETED)), reason="they run as they are")
def test_kernels_by_the_interpreter():
    """All cases below, in a process with the interpreter."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-m", ""]
    run = subprocess.run(
        command, env=os.environ | {INTERPRETED: "1"}, capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stdout[-4000:]


def drawn(lanes, heads, queries, keys, width, columns, shift, *_):
    """Query, key, value and offset as leaves; rows of the keys are strided, as a model's are."""
    torch.manual_seed(0)

    def rows(count):
        return torch.randn(lanes, count, heads, width, dtype=DTYPE, device=DEVICE).transpose(1, 2)

    shape = (heads, columns) if shift == 0 else (lanes, heads, queries, columns)
    offset = torch.randn(shape, dtype=DTYPE, device=DEVICE)
    given = (rows(queries), rows(keys), rows(keys), offset)
    return [tensor.detach().requires_grad_() for tensor in given]


def kept_weights(leaves, numbers, shift, rate, *own):
    """What dropout multiplies the weights by, (B, H, N, K): values are unit vectors."""
    from accelerated.fast.attention_gpu import attend

    query, key, _, offset = (leaf.detach() for leaf in leaves)
    keys, width = key.shape[2:]
    missing = -keys % width
    unit = torch.nn.functional.pad(torch.eye(keys, dtype=DTYPE, device=DEVICE), (0, missing))
    unit = unit.expand(*key.shape[:2], -1, -1)
    parts = [
        attend(query, key, part.contiguous(), offset, numbers, shift, SCALE, rate, *own)[0]
        for part in unit.split(width, -1)
    ]
    weights = torch.cat(parts, -1)[..., :keys]
    return (weights != 0).double() / (1 - rate)


def written_out(query, key, value, offset, shift, kept=None, split=0, skip=0):
    """What the kernel computes, by a matrix (N, K) of columns; `kept` multiplies the weights."""
    i = torch.arange(query.shape[2], device=DEVICE)[:, None]
    j = torch.arange(key.shape[2], device=DEVICE)
    column = j - i + shift + skip * (j >= split)
    last = offset.shape[-1] - 1
    seen = (column >= 0) & (column <= last)
    column = column.clamp(0, last)
    if offset.dim() == 2:
        by_key = offset[:, column]
    else:
        by_key = offset.gather(-1, column.expand(*offset.shape[:2], -1, -1))
    scores = query @ key.mT * SCALE + by_key
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (weights if kept is None else weights * kept) @ value


def relative_error(expected, found):
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm()).item()


def assert_small(errors, tolerance=TOLERANCE):
    """No error, by name, is above the tolerance or NaN."""
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong


@needs_kernels
@pytest.mark.parametrize(
    "case,rate",
    [
        *((case, 0.0) for case in CASES),
        ("a sliding window", 0.3),
        ("causal without memory", 0.3),
        ("distances of the first keys' own", 0.3),
    ],
)
def test_the_kernel_equals_attention_written_out(case, rate):
    """The output and all gradients; with dropout both have the same mask."""
    from accelerated.fast.attention_gpu import attend, drawn_for

    _, _, _, _, _, _, shift, *own = CASES[case]
    leaves = drawn(*CASES[case])
    numbers = drawn_for(leaves[0], rate)
    kept = kept_weights(leaves, numbers, shift, rate, *own) if rate else None

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = written_out(*exact, shift, kept, *own)
    found, _ = attend(*leaves, numbers, shift, SCALE, rate, *own)
    dout = torch.randn_like(expected)
    of_plain = torch.autograd.grad(expected, exact, dout)
    of_kernel = torch.autograd.grad(found, leaves, dout.to(found.dtype))

    errors = {"out": relative_error(expected, found)}
    for name, plain, kernel in zip(
        ("query", "key", "value", "offset"), of_plain, of_kernel, strict=True
    ):
        errors[f"d{name}"] = relative_error(plain, kernel) if plain.norm() > 1e-9 else 0.0
    assert_small(errors)


def both_paths(shapes, plain, by_kernel, monkeypatch):
    """Fail unless an attention and every gradient are the same by its plain path and the kernel.

    Each is a function of leaves of these shapes, of the same random numbers.
    """
    from accelerated.fast import paths

    monkeypatch.setattr(paths, "takes_distance_attention", lambda query: True)
    torch.manual_seed(1)
    drawn = [torch.randn(shape, device=DEVICE).to(DTYPE) for shape in shapes]
    found = []
    for attention, dtype in ((plain, torch.float64), (by_kernel, DTYPE)):
        leaves = [leaf.to(dtype, copy=True).requires_grad_() for leaf in drawn]
        out = attention(*leaves)
        dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(dtype)
        found.append([out, *torch.autograd.grad(out, leaves, dout)])
    both = zip(*found, strict=True)
    errors = {number: relative_error(*pair) for number, pair in enumerate(both)}
    assert_small(errors, 4 * TOLERANCE)  # 16-bit sums around the kernel round, too


@needs_kernels
@pytest.mark.parametrize("has_own", [True, False], ids=["own distances", "one row a distance"])
def test_relative_attention_by_the_kernel_equals_the_plain_path(has_own, monkeypatch):
    """The output and every gradient; compressed rows may have distances of their own."""
    from accelerated.attention import relative_shift
    from accelerated.attention.relative_shift import AttentionInputs

    heads = 2
    length = 20
    compressed = 7
    memory = 13
    width = 16
    keys = compressed + memory + length
    before = memory if has_own else compressed + memory
    shapes = [(2, heads, length, width), *[(2, heads, keys, width)] * 2]
    shapes += [(heads, before + length, width), (heads, width), (heads, width)]
    shapes += [(heads, compressed + length, width), (heads, width)] * has_own

    def plain(*leaves):
        own = leaves[6:] or None
        return relative_shift.relative_attention_plain(
            AttentionInputs(*leaves[:6]), compressed=own
        )[0]

    def by_kernel(*leaves):
        own = leaves[6:] or None
        return relative_shift.relative_attention(AttentionInputs(*leaves[:6]), compressed=own)[0]

    both_paths(shapes, plain, by_kernel, monkeypatch)


@needs_kernels
def test_sliding_attention_by_the_kernel_equals_the_plain_path(monkeypatch):
    """The output and every gradient; of the offsets by distance the kernel takes W."""
    from accelerated.attention import sliding_window

    window = 16
    rows = (2, 3, 4 * window, 16)
    shapes = [(2, 3, 3 * window, 16), rows, rows, (3, 3 * window - 1)]
    _, seen = sliding_window.tables_by_distance(window, 4, 8)
    hidden = ~seen.to(DEVICE)

    def plain(query, key, value, offset):
        by_distance = offset.masked_fill(hidden, -math.inf)
        tile = sliding_window.offset_of_tile(by_distance, query.dtype)
        return sliding_window.sliding_attention_plain(query, key, value, tile)

    def by_kernel(query, key, value, offset):
        by_distance = offset.masked_fill(hidden, -math.inf)
        return sliding_window.sliding_attention(query, key, value, by_distance)

    both_paths(shapes, plain, by_kernel, monkeypatch)


@needs_kernels
def test_dropout_draws_each_weight_alone():
    """Its share is dropped, whatever lane, head, call, neighbouring key or query it is."""
    from accelerated.fast.attention_gpu import drawn_for

    queries = 64
    window = 32
    rate = 0.25
    leaves = drawn(2, 2, queries, queries + window, 32, window, 0)
    seen = torch.arange(queries)[:, None] + torch.arange(window)  # by query i the keys i, i + 1...
    masks = []
    for _ in range(2):
        numbers = drawn_for(leaves[0], rate)
        kept = kept_weights(leaves, numbers, 0, rate, 0, 0).flatten(0, 1) > 0
        masks.extend(mask.gather(1, seen.to(DEVICE)) for mask in kept)
    for mask in masks:
        assert abs(mask.double().mean().item() - (1 - rate)) < 0.05  # five standard deviations

    pairs = {
        "lanes, heads or calls": itertools.combinations(masks, 2),
        "a query's neighbouring keys": [(mask[:, 1:], mask[:, :-1]) for mask in masks],
        "a key's neighbouring queries": [(mask[1:, :-1], mask[:-1, 1:]) for mask in masks],
    }
    for name, both in pairs.items():
        shares = [(one & other).double().mean() for one, other in both]
        share = torch.stack(shares).mean().item()
        assert abs(share - (1 - rate) ** 2) < 0.02, f"weights know of each other: {name}"


@needs_kernels
@pytest.mark.parametrize("rows, words, columns", [(5, 7, 7), (3, 4096, 4160), (4, 9001, 9024)])
def test_the_losss_kernel_equals_the_plain_path(rows, words, columns):
    """Nats and gradient: of the first and the last word, of an ignored row, of extreme logits."""
    from accelerated.fast import loss
    from accelerated.fast.loss_gpu import loss_in_place

    torch.manual_seed(0)
    logits = 3 * torch.randn(rows, columns, device=DEVICE)
    logits[0] *= 1e4
    logits = logits.to(DTYPE)
    targets = torch.tensor([words - 1, IGNORED, 0, words // 2, 1][:rows], device=DEVICE)
    expected, gradient = loss.loss_and_gradient(logits.double(), targets, words)
    gradient[1] = 0.0
    found = loss_in_place(logits, targets, words, IGNORED)
    assert found[1] == 0.0, "an ignored row counts"
    torch.testing.assert_close(found.double().sum(), expected, rtol=1e-5, atol=1e-4)
    tolerance = 5e-3 if ON_A_GPU else 1e-6
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not ON_A_GPU, reason="needs a GPU")
def test_whole_models_take_the_kernel():
    """Of the attentions that have offsets by distance, in 16-bit numbers, and no others."""
    from accelerated.fast.devices import takes_distance_attention

    query = torch.zeros(2, 3, 4, 64, device="cuda")
    assert takes_distance_attention(query.bfloat16()) and not takes_distance_attention(query)
    narrow = query[..., :48].bfloat16()
    assert not takes_distance_attention(narrow), "heads of 48 have no kernel"
