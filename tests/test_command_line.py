"""train.py and eval.py as a user runs them, at sizes that take seconds."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import eval as evaluation_script
import train as training_script
from accelerated.errors import InputError
from accelerated.training.checkpoint import checkpoint_path, load_checkpoint

ROOT = Path(__file__).parent.parent
TINY = [
    *("--width", 16, "--layers", 2, "--heads", 2, "--head-width", 8, "--feed-forward", 32, "--window", 8, "--segment", 16),
    *("--states", 4, "--recurrent-layers", 2, "--batch", 3, "--warmup", 2, "--sample", 5, "--validation-segments", 0),
]

COMPRESSIVE = [
    *("--model", "compressive", "--width", 16, "--layers", 2, "--heads", 2, "--head-width", 8, "--feed-forward", 32),
    *("--segment", 8, "--memory", 8, "--compressed-memory", 4, "--compression-rate", 2, "--batch", 3, "--warmup", 2),
    *("--sample", 0, "--validation-segments", 0),
]

MEMFORMER = [
    *("--model", "memformer", "--width", 16, "--encoder-layers", 1, "--decoder-layers", 1, "--heads", 2, "--head-width", 8),
    *("--feed-forward", 32, "--segment", 8, "--slots", 3, "--horizon", 3, "--batch", 3, "--warmup", 2, "--sample", 0),
    *("--validation-segments", 0),
]

WINDOWED = [
    *("--model", "pretrained_recurrence", "--width", 16, "--layers", 2, "--heads", 2, "--feed-forward", 32, "--segment", 8),
    *("--max-positions", 12, "--horizon", 3, "--batch", 3, "--warmup", 2, "--sample", 0, "--validation-segments", 0),
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes((ROOT / "reference" / "block_recurrent.py").read_bytes())
    return path


def train(*argv):
    training_script.main([str(a) for a in argv])


def evaluate(*argv):
    evaluation_script.main([str(a) for a in argv])


def saved(run):
    return load_checkpoint(checkpoint_path(run))


def test_training_saves_reports_and_samples(text, tmp_path, capsys):
    run = tmp_path / "run"
    train("--data", text, "--steps", 3, "--out", run, *TINY)
    printed = capsys.readouterr().out
    assert re.search(r"bits per byte: \d\.\d{3} with the memory, \d\.\d{3} with it cleared at every segment", printed)
    assert "a sample after the opening" in printed and f"python eval.py {run}" in printed
    assert saved(run)["step"] == 3
    evaluate(run)
    carried = capsys.readouterr().out
    evaluate(run, "--clear-memory")
    cleared = capsys.readouterr().out
    reported = re.search(r"byte: (\S+) with the memory, (\S+) with", printed).groups()
    evaluated = [re.search(r"bits per byte +(\S+)", text).group(1) for text in (carried, cleared)]
    assert [float(bits) for bits in reported] == pytest.approx([float(bits) for bits in evaluated], abs=6e-4)
    assert evaluated[0] != evaluated[1]
    assert "tokens scored" in carried and "perplexity" in carried


def test_evaluation_of_other_data_and_splits(text, tmp_path, capsys):
    run = tmp_path / "run"
    train("--data", text, "--steps", 1, "--out", run, *TINY)
    other = tmp_path / "other.txt"
    other.write_text("another text entirely " * 60)
    capsys.readouterr()
    evaluate(run, "--data", other, "--split", "test", "--batch", 2)
    printed = capsys.readouterr().out
    assert f"test split of {other}" in printed and "tokens scored       65\n" in printed


@pytest.mark.parametrize("method", ["through_time", "checkpointed", "memory_replay"])
def test_a_run_cut_in_two_equals_an_uncut_run(text, tmp_path, method):
    """Parameters, optimiser, places in documents, carried state and random numbers: bit for bit on CPU."""
    options = [
        "--data",
        text,
        "--backprop",
        method,
        "--horizon",
        2,
        "--dropout",
        0.2,
        "--schedule",
        "constant",
        *TINY,
        "--sample",
        0,
    ]
    train(*options, "--steps", 6, "--out", tmp_path / "whole")
    train(*options, "--steps", 3, "--out", tmp_path / "cut")
    train("--resume", tmp_path / "cut", "--steps", 6)
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert cut["step"] == 6 and whole["lanes"] == cut["lanes"]
    assert torch.equal(whole["random"], cut["random"])
    for name, value in whole["parameters"].items():
        assert torch.equal(value, cut["parameters"][name]), name
    assert all(torch.equal(a, b) for a, b in zip(whole["state"], cut["state"], strict=True))


def test_a_compressive_run_cut_between_updates_equals_an_uncut_run(text, tmp_path):
    """Checkpoints wait for an update, so that no gathered gradient is lost: those of steps 4 and 8 come at 5 and 8."""
    options = [
        *COMPRESSIVE, "--data", text, "--update-every", 3, "--update-every-from", 2, "--schedule", "constant", "--save-every", 4,
    ]  # fmt: skip
    train(*options, "--steps", 8, "--out", tmp_path / "whole")
    steps, stopped = [], tmp_path / "cut"

    def save_and_stop(run, contents, *others):
        steps.append(contents["step"])
        save(run, contents, *others)
        raise KeyboardInterrupt

    save = training_script.save_in_run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_script, "save_in_run", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(*options, "--steps", 8, "--out", stopped)
    assert steps == [5]
    train("--resume", stopped, "--steps", 8)
    whole, cut = saved(tmp_path / "whole"), saved(stopped)
    assert all(torch.equal(value, cut["parameters"][name]) for name, value in whole["parameters"].items())
    assert all(torch.equal(a, b) for a, b in zip(whole["state"], cut["state"], strict=True))


@pytest.mark.parametrize("options", [["--task-infilling", 0.4, "--task-recall", 0.3], ["--encoder-layers", 0]])
def test_a_memformer_run_cut_in_two_equals_an_uncut_run(text, tmp_path, options):
    """With tasks drawn for every rollout, whose place in the random numbers and in the documents must be kept."""
    options = [*MEMFORMER, *options, "--data", text, "--dropout", 0.2, "--schedule", "constant"]
    train(*options, "--steps", 6, "--out", tmp_path / "whole")
    train(*options, "--steps", 3, "--out", tmp_path / "cut")
    train("--resume", tmp_path / "cut", "--steps", 6)
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert whole["lanes"] == cut["lanes"] and whole["lanes"]["rollouts"] == 6
    assert all(torch.equal(value, cut["parameters"][name]) for name, value in whole["parameters"].items())
    assert all(torch.equal(a, b) for a, b in zip(whole["state"], cut["state"], strict=True))


@pytest.mark.parametrize("method", ["through_time", "checkpointed", "memory_replay"])
def test_an_overlapping_run_cut_in_two_equals_an_uncut_run(text, tmp_path, method):
    options = [*WINDOWED, "--overlap", 3, "--data", text, "--dropout", 0.2, "--schedule", "constant", "--backprop", method]
    train(*options, "--steps", 6, "--out", tmp_path / "whole")
    train(*options, "--steps", 3, "--out", tmp_path / "cut")
    train("--resume", tmp_path / "cut", "--steps", 6)
    whole, cut = saved(tmp_path / "whole"), saved(tmp_path / "cut")
    assert whole["lanes"] == cut["lanes"]
    assert all(torch.equal(value, cut["parameters"][name]) for name, value in whole["parameters"].items())
    assert all(torch.equal(a, b) for a, b in zip(whole["state"], cut["state"], strict=True))


def test_overlapping_windows_score_every_token_once_in_training(text, tmp_path, monkeypatch):
    scored, replay = [], training_script.BACKPROP["through_time"]

    def watch(model, segments, *others):
        scored.extend(segment.scored.sum(1) for segment in segments)
        return replay(model, segments, *others)

    monkeypatch.setitem(training_script.BACKPROP, "through_time", watch)
    train(*WINDOWED, "--overlap", 3, "--batch", 1, "--horizon", 4, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    assert [int(count) for count in scored] == [8, *[5] * 7]


def test_a_plain_run_is_fine_tuned_with_and_without_recurrence(text, tmp_path, capsys):
    """The command sequence of docs/pretrained_recurrence.md: pretrain, fine-tune twice, one table."""
    base, plain, recurrent = (tmp_path / name for name in ("base", "plain", "recurrent"))
    train(*WINDOWED, "--vectors", 0, "--data", text, "--steps", 3, "--out", base)
    begun = saved(base)["parameters"]
    assert not any(name.startswith("module.") for name in begun)
    train("--init", base, "--steps", 1, "--learning-rate", 1e-12, "--weight-decay", 0, "--sample", 0, "--out", plain)
    for name, value in saved(plain)["parameters"].items():
        assert torch.allclose(value, begun[name], rtol=0, atol=1e-9), name
    train("--init", base, "--vectors", 1, "--module-width", 8, "--overlap", 2, "--steps", 2, "--sample", 0, "--out", recurrent)
    contents = saved(recurrent)
    config = contents["model_config"]
    assert (config["vectors"], config["overlap"], config["width"], config["module_width"]) == (1, 2, 16, 8)
    assert contents["data_config"]["data"] == str(text) and "module.hidden_1" in contents["parameters"]
    assert all(torch.isfinite(value).all() for value in contents["parameters"].values())
    capsys.readouterr()
    evaluate(plain, recurrent, "--overlap", "0,2,7")
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("GPT-2", "recurrent"))]
    assert [row.split()[3] for row in rows] == ["0", "2", "7"] * 2
    assert sum("(trained with overlap 2)" in row for row in rows) == 2 and "words of the original text" in lines[0]
    evaluate(plain)
    printed = capsys.readouterr().out
    assert re.search(r"bits per byte +(\S+)", printed).group(1) == rows[0].split()[5]
    assert ", no memory\n" in printed
    assert re.search(r"log-probability +(\S+)", printed).group(1).startswith(rows[0].split()[6].rstrip("0123456789").rstrip("."))
    evaluate(recurrent, "--overlap", "own", "--split", "test")
    own = capsys.readouterr().out.splitlines()[-1].split()
    assert own[3] == "2" and own[4:6] == rows[4].split()[7:9]


def test_runs_that_share_a_line_are_averaged(text, tmp_path, capsys):
    for seed in (0, 1):
        train(*WINDOWED, "--data", text, "--steps", 1, "--seed", seed, "--out", tmp_path / str(seed))
    capsys.readouterr()
    evaluate(tmp_path / "0", tmp_path / "1", "--overlap", "own")
    lines = capsys.readouterr().out.splitlines()
    bits = [float(line.split()[5]) for line in lines if line.startswith("recurrent, window 8   ")]
    [mean] = [line for line in lines if line.startswith("recurrent, window 8, overlap 0, 2 runs")]
    shown = re.search(r"valid ppl.*?bits/byte (\S+) \((\S+) \.\. (\S+)\)", mean).groups()
    assert [float(value) for value in shown] == pytest.approx([sum(bits) / 2, min(bits), max(bits)], abs=1e-4)


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--overlap", "8"], r"--overlap is 8; it must lie in 0..7 for segment 8"),
        (["--overlap", "0,9"], r"--overlap is 9; it must lie in 0..7"),
        (["--segment", "13"], "--segment 13 is longer than the position table; max_positions is 12"),
        (["--overlap", "0", "--sample", 3], "each replace the evaluation; give one"),
        (["--new-window"], "go with --sample N"),
        (["--memory", 3], "--memory is for compressive models, this is pretrained_recurrence"),
    ],
)
def test_windowed_evaluation_refuses_in_one_line(text, tmp_path, argv, words):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    with pytest.raises(InputError, match=words) as caught:
        evaluate(tmp_path / "run", *argv)
    assert "\n" not in str(caught.value)


def test_windows_are_of_pretrained_recurrence_models_and_runs_of_the_table(text, tmp_path, capsys):
    train("--data", text, "--steps", 1, "--out", tmp_path / "other", *TINY)
    for option in (["--overlap", "0"], ["--segment", 8], ["--pool", "advance"], ["--sample", 2, "--new-window"]):
        with pytest.raises(InputError, match="is for pretrained_recurrence models, this is block_recurrent"):
            evaluate(tmp_path / "other", *option)
    with pytest.raises(InputError, match="2 runs were given; only --overlap takes more than one"):
        evaluate(tmp_path / "other", tmp_path / "other")
    for overlap in ("none", "1,x"):
        with pytest.raises(SystemExit):
            evaluate(tmp_path / "other", "--overlap", overlap)
    assert capsys.readouterr().err.count("eval.py: argument --overlap: ") == 2


def test_windows_of_another_length_are_evaluated(text, tmp_path, capsys):
    """Up to the position table; the run's own overlap does not stand in the way of a shorter window."""
    train(*WINDOWED, "--overlap", 6, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    capsys.readouterr()
    for window in (12, 4):
        evaluate(tmp_path / "run", "--segment", window, "--overlap", "0,3")
        assert capsys.readouterr().out.count(f"recurrent, window {window}") == 2
    with pytest.raises(InputError, match="--segment 4 is no longer than the run's overlap 6; give --overlap"):
        evaluate(tmp_path / "run", "--segment", 4)


def test_a_size_of_zero_is_a_value(text, tmp_path):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="--segment is 0; it must be at least 1"):
        evaluate(tmp_path / "run", "--segment", 0)


def test_what_differs_from_training_is_said_without_a_table_too(text, tmp_path, capsys):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    for options, words in (
        ([], None),
        (["--segment", 9], "trained with segment 8\n"),
        (["--pool", "advance"], "trained with pool all\n"),
    ):
        capsys.readouterr()
        evaluate(tmp_path / "run", *options)
        printed = capsys.readouterr().out
        assert words in printed if words else "trained with" not in printed


def test_sampling_refuses_what_it_would_not_read(text, tmp_path):
    train("--data", text, "--steps", 1, "--out", tmp_path / "run", *TINY)
    for option in (["--data", text], ["--split", "test"], ["--batch", 2], ["--clear-memory"]):
        with pytest.raises(InputError, match=f"--sample reads --prompt and no documents; leave {option[0]} out"):
            evaluate(tmp_path / "run", "--sample", 2, *option)


def test_options_of_a_resumed_runs_model_are_refused_as_such(text, tmp_path):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="--resume keeps the run's model and data"):
        train("--resume", tmp_path / "run", "--overlap", 1, "--steps", 2)


def test_the_table_refuses_runs_of_different_data_and_counts_a_run_once(text, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text entirely " * 60)
    for name, data in (("a", text), ("b", other)):
        train(*WINDOWED, "--data", data, "--steps", 1, "--out", tmp_path / name)
    with pytest.raises(InputError, match="the runs read different data"):
        evaluate(tmp_path / "a", tmp_path / "b", "--overlap", "0")
    capsys.readouterr()
    evaluate(tmp_path / "a", tmp_path / "b", tmp_path / "a", "--overlap", "0,0", "--data", other, "--clear-memory")
    printed = capsys.readouterr().out
    assert printed.count("recurrent, window 8  ") == 2 and printed.count("(memory cleared)") == 2 and "2 runs" in printed
    evaluate(tmp_path / "a", "--overlap", "1", "--pool", "advance")
    assert "(trained with overlap 0, trained with pool all)" in capsys.readouterr().out


def test_recall_is_evaluated_at_overlaps_and_by_plain_models(tmp_path, capsys):
    """Texts without words, segments without questions."""
    options = [*WINDOWED, "--data", "recall", "--recall-distance", 8, "--steps", 1]
    train(*options, "--vectors", 0, "--validation-segments", 1, "--out", tmp_path / "none")
    assert "the first 1 segments of every lane score nothing" in capsys.readouterr().out
    train(*options, "--vectors", 0, "--out", tmp_path / "run")
    assert re.search(r"validation on 1024 tokens: \d\.\d{3} bits per byte; this model carries no memory", capsys.readouterr().out)
    evaluate(tmp_path / "run", "--overlap", "0,2")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("GPT-2")]
    assert [line[4] for line in lines] == ["-", "-"]
    with pytest.raises(InputError, match="carries no memory"):
        evaluate(tmp_path / "run", "--temporal-range", 2)
    train("--init", tmp_path / "run", "--steps", 1, "--out", tmp_path / "again")
    assert saved(tmp_path / "again")["data_config"]["recall"]["distance"] == 8
    train("--init", tmp_path / "run", "--recall-distance", 9, "--steps", 1, "--out", tmp_path / "farther")
    assert saved(tmp_path / "farther")["data_config"]["recall"]["distance"] == 9


def test_a_continuation_in_a_new_window(text, tmp_path, capsys):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    capsys.readouterr()
    outs = []
    for options in ([], ["--new-window"]):
        evaluate(tmp_path / "run", "--sample", 5, "--prompt", "def forward(", "--temperature", 0, *options)
        outs.append(capsys.readouterr().out)
    assert all(out.startswith("def forward(") for out in outs)


def test_a_gpt2_is_fine_tuned(text, tmp_path, capsys):
    """--init with a file of another project's weights: they are what training begins with, and recurrence is added."""
    safetensors = pytest.importorskip("safetensors.torch", reason="reading GPT-2 needs the extra gpt2: safetensors")
    torch.set_default_dtype(torch.float32)
    tensors = {"wte.weight": (256, 16), "wpe.weight": (12, 16), "ln_f.weight": (16,), "ln_f.bias": (16,)}
    for i in range(2):
        shapes = {"ln_1.weight": (16,), "ln_1.bias": (16,), "ln_2.weight": (16,), "ln_2.bias": (16,)}
        shapes |= {"attn.c_attn.weight": (16, 48), "attn.c_attn.bias": (48,), "attn.c_proj.weight": (16, 16)}
        shapes |= {"attn.c_proj.bias": (16,), "mlp.c_fc.weight": (16, 32), "mlp.c_fc.bias": (32,)}
        shapes |= {"mlp.c_proj.weight": (32, 16), "mlp.c_proj.bias": (16,)}
        tensors |= {f"h.{i}.{name}": shape for name, shape in shapes.items()}
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in tensors.items()}
    (tmp_path / "gpt2").mkdir()
    path = tmp_path / "gpt2" / "model.safetensors"
    safetensors.save_file(tensors, path)
    options = [*WINDOWED[2:], "--tokenizer", "bytes", "--data", text, "--steps", 1, "--learning-rate", 1e-12]
    for init in (path, path.parent):
        train("--init", init, "--preset", "tiny", *options, "--out", tmp_path / f"run of {init.name}")
        learned = saved(tmp_path / f"run of {init.name}")["parameters"]
        assert torch.allclose(learned["layers.1.output"], tensors["h.1.attn.c_proj.weight"].t(), atol=1e-6)
        assert torch.allclose(learned["layers.0.key"], tensors["h.0.attn.c_attn.weight"].t()[16:32], atol=1e-6)
        assert "module.inserted" in learned
    with pytest.raises(InputError, match=r"2 layers of width 16, .* was asked for; give --layers 2"):
        train("--init", path, "--preset", "tiny", *options, "--layers", 3, "--out", tmp_path / "deep")
    assert not (tmp_path / "deep").exists()


def test_init_from_a_run_that_does_not_fit_is_refused(text, tmp_path):
    train("--data", text, "--steps", 1, "--out", tmp_path / "other", *TINY)
    train("--init", tmp_path / "other", "--data", text, "--steps", 1, "--sample", 0, "--out", tmp_path / "again")
    assert saved(tmp_path / "again")["model"] == "block_recurrent"
    with pytest.raises(InputError, match="holds a block_recurrent; leave --model compressive out"):
        train("--init", tmp_path / "other", "--model", "compressive", "--out", tmp_path / "x")
    for option, value, own in (("--width", 24, 16), ("--heads", 4, 2), ("--layers", 3, 2)):
        with pytest.raises(InputError, match=f"{option} is {value}, the weights of --init .* have {own}; leave it out"):
            train("--init", tmp_path / "other", option, value, "--data", text, "--out", tmp_path / "x")
    with pytest.raises(InputError, match="is a run's checkpoint; give its folder, "):
        train("--init", checkpoint_path(tmp_path / "other"), "--out", tmp_path / "x")
    with pytest.raises(InputError, match="no such file"):
        train("--init", tmp_path / "nowhere", "--data", "nowhere either", "--out", tmp_path / "x")
    with pytest.raises(InputError, match="and only --model pretrained_recurrence begins with"):
        train("--init", tmp_path / "nowhere", "--model", "memformer", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_module_is_taken_whole_or_not_at_all(text, tmp_path):
    train(*WINDOWED, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    for option in (["--pooling", "max"], ["--insertion-layers", 1], ["--pool-final-norm"]):
        with pytest.raises(InputError, match=f"{option[0]} is of the recurrence module, and --vectors 0 has none"):
            train("--init", tmp_path / "run", "--vectors", 0, *option, "--out", tmp_path / "x")
    with pytest.raises(InputError, match=r"module\.hidden_3 should be absent"):
        train("--init", tmp_path / "run", "--module-layers", 2, "--steps", 1, "--out", tmp_path / "x")
    train("--init", tmp_path / "run", "--vectors", 0, "--steps", 1, "--sample", 0, "--out", tmp_path / "plain")
    assert not any(name.startswith("module.") for name in saved(tmp_path / "plain")["parameters"])


def test_a_prompt_may_be_any_bytes_and_the_first_document_empty(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text("" if i % 2 else f"some text number {i}. " * 40)
    train(*WINDOWED, "--data", folder, "--steps", 1, "--sample", 3, "--out", tmp_path / "run")
    evaluate(tmp_path / "run", "--sample", 2, "--prompt", os.fsdecode(b"caf\xe9"))
    assert "caf\N{REPLACEMENT CHARACTER}" in capsys.readouterr().out


def test_tasks_reach_the_training(text, tmp_path, monkeypatch):
    kinds = []
    replay = training_script.BACKPROP["memory_replay"]

    def watch(model, segments, *others):
        kinds.extend(None if segment.task is None else segment.task.kind.tolist() for segment in segments)
        return replay(model, segments, *others)

    monkeypatch.setitem(training_script.BACKPROP, "memory_replay", watch)
    train(*MEMFORMER, "--data", text, "--steps", 2, "--out", tmp_path / "plain")
    assert kinds == [None] * 6
    kinds.clear()
    train(*MEMFORMER, "--data", text, "--steps", 6, "--task-infilling", 0.4, "--task-recall", 0.5, "--out", tmp_path / "run")
    assert {kind for lanes in kinds for kind in lanes} == {0, 1, 2}


def test_a_horizon_longer_than_any_document_is_warned_of(tmp_path, capsys):
    """The recall task's documents have 200 tokens, 25 segments of 8."""
    options = [*MEMFORMER, "--data", "recall", "--recall-distance", 128, "--steps", 1, "--batch", 2]
    train(*options, "--horizon", 25, "--out", tmp_path / "fits")
    assert "warning" not in capsys.readouterr().err
    train(*options, "--horizon", 26, "--out", tmp_path / "long")
    warning = capsys.readouterr().err
    assert (
        "warning: --horizon 26 is longer than the longest training document (25 segments)" in warning and "25 would do" in warning
    )


def test_temporal_range_is_printed(text, tmp_path, capsys):
    train(*MEMFORMER, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    capsys.readouterr()
    evaluate(tmp_path / "run", "--temporal-range", 3)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1] in "012"]
    assert [row[0] for row in rows] == ["0", "1", "2"] and all(0 < float(row[1]) < 20 for row in rows)
    with pytest.raises(InputError, match="no document scores anything in its segments 9001 to 18000"):
        evaluate(tmp_path / "run", "--temporal-range", 9000)
    with pytest.raises(InputError, match="--temporal-range is 1; it must be at least 2"):
        evaluate(tmp_path / "run", "--temporal-range", 1)
    with pytest.raises(InputError, match="each replace the evaluation"):
        evaluate(tmp_path / "run", "--temporal-range", 2, "--sample", 3)
    with pytest.raises(InputError, match="--clear-memory leaves --temporal-range nothing to look into"):
        evaluate(tmp_path / "run", "--temporal-range", 2, "--clear-memory")


def test_the_schedule_reaches_the_optimiser(text, tmp_path):
    train("--data", text, "--steps", 3, "--learning-rate", 0.01, "--final-fraction", 0.25, "--out", tmp_path / "run", *TINY)
    groups = saved(tmp_path / "run")["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.0025, 0.0025])


def test_an_auxiliary_loss_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerated.compressive.attention_reconstruction", lambda *a: torch.tensor(float("nan")))
    with pytest.raises(InputError, match=r"the layers\.0\.compression is nan at step 1"):
        train(*COMPRESSIVE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    assert not checkpoint_path(tmp_path / "run").exists()


def test_a_compression_that_nothing_would_train_is_refused(text, tmp_path):
    with pytest.raises(InputError, match="--horizon 1 has none; give --horizon 2"):
        train(*COMPRESSIVE, "--compression-loss", "bptt", "--data", text, "--out", tmp_path / "run")
    train(*COMPRESSIVE, "--compression-loss", "bptt", "--horizon", 2, "--data", text, "--steps", 1, "--out", tmp_path / "run")


def test_gathered_updates_are_the_mean_over_their_iterations(text, tmp_path, monkeypatch):
    """Parameters stand still between updates, and AdamW sees the mean of the gathered gradients."""
    seen, prepare = [], training_script.prepare_gradients

    def watch(model, iterations, limit):
        before = model.embedding.grad.clone()
        norm = prepare(model, iterations, limit)
        seen.append((iterations, float((before / model.embedding.grad).nanmedian())))
        return norm

    monkeypatch.setattr(training_script, "prepare_gradients", watch)
    train(*COMPRESSIVE, "--data", text, "--update-every", 3, "--steps", 7, "--clip", 0, "--out", tmp_path / "run")
    assert [count for count, _ in seen] == [3, 3, 1]
    assert [ratio for _, ratio in seen] == pytest.approx([3, 3, 1])


def test_compressive_runs_are_inspected_and_evaluated_at_other_sizes(text, tmp_path, capsys):
    run = tmp_path / "run"
    train(*COMPRESSIVE, "--data", text, "--steps", 2, "--out", run)
    assert "temporal range 2 layers x (8 + 2 x 4) = 32 tokens" in capsys.readouterr().out
    evaluate(run)
    assert "trained with" not in capsys.readouterr().out
    evaluate(run, "--memory", 5, "--compressed-memory", 9)
    printed = capsys.readouterr().out
    assert "evaluated with memory 5, compressed_memory 9; trained with memory 8, compressed_memory 4" in printed
    assert "temporal range 2 layers x (5 + 2 x 9) = 46 tokens" in printed and "bits per byte" in printed
    evaluate(run, "--compressed-memory", 0)
    assert "trained with" in capsys.readouterr().out
    evaluate(run, "--attention-buckets", "--sequences", 20)
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith(("compressed memory", "memory ", "segment "))]
    assert len(rows) == 3 and "20 segments" in printed
    assert sum(float(row.split("sum")[1]) for row in rows) == pytest.approx(100, abs=0.2)
    evaluate(run, "--compression-by-layer", "--sequences", 20)
    assert len(re.findall(r"layer \d +attention-reconstruction loss \d\.\d{3}e", capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--memory", -1], "memory is -1"),
        (["--sequences", 5], "goes with"),
        (["--attention-buckets", "--sample", 3], "each replace the evaluation"),
        (["--attention-buckets", "--clear-memory"], "nothing to look into"),
        (["--attention-buckets", "--sequences", 1], "--sequences is 1"),
        (["--attention-buckets", "--memory", 9000], "0 segments have full memories"),
        (["--compression-by-layer", "--compressed-memory", 0], "nothing is compressed"),
    ],
)
def test_compressive_evaluation_refuses_in_one_line(text, tmp_path, argv, words):
    train(*COMPRESSIVE, "--data", text, "--steps", 1, "--out", tmp_path / "run")
    with pytest.raises(InputError, match=words) as caught:
        evaluate(tmp_path / "run", *argv)
    assert "\n" not in str(caught.value)


def test_a_compression_that_was_never_trained_is_refused(text, tmp_path):
    train(*COMPRESSIVE, "--compressed-memory", 0, "--data", text, "--steps", 1, "--out", tmp_path / "xl")
    with pytest.raises(InputError, match="trained with compressed_memory 0 and has learned no compression"):
        evaluate(tmp_path / "xl", "--compressed-memory", 4)
    train("--data", text, "--steps", 1, "--out", tmp_path / "other", *TINY)
    for option in (["--memory", 4], ["--attention-buckets"], ["--compression-by-layer"]):
        with pytest.raises(InputError, match=f"{option[0]} is for compressive models, this is block_recurrent"):
            evaluate(tmp_path / "other", *option)


def test_a_compressive_config_that_cannot_work_is_refused(text, tmp_path):
    with pytest.raises(InputError, match="--compression-rate 3 does not divide segment 8"):
        train(*COMPRESSIVE, "--compression-rate", 3, "--data", text, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_resumed_backwards(text, tmp_path):
    train("--data", text, "--steps", 3, "--out", tmp_path / "run", *TINY)
    before = checkpoint_path(tmp_path / "run").read_bytes()
    for steps in (2, 3):
        with pytest.raises(InputError, match="stands at step 3; give --steps above"):
            train("--resume", tmp_path / "run", "--steps", steps)
    assert checkpoint_path(tmp_path / "run").read_bytes() == before


def test_checkpoints_come_as_often_as_asked(text, tmp_path, monkeypatch):
    steps = []
    save = training_script.save_in_run
    monkeypatch.setattr(training_script, "save_in_run", lambda run, c, *a: steps.append(c["step"]) or save(run, c, *a))
    train("--data", text, "--steps", 5, "--save-every", 2, "--out", tmp_path / "run", *TINY)
    assert steps == [2, 4, 5]


def test_recall_reports_right_answers(tmp_path, capsys):
    train("--data", "recall", "--steps", 1, "--out", tmp_path / "run", *TINY)
    assert re.search(r"right answers: \S+% with the memory, \S+% with it cleared \(chance 10%\)", capsys.readouterr().out)


def test_validation_that_scores_nothing_says_so(tmp_path, capsys):
    """The recall task's first segments ask nothing."""
    options = [*COMPRESSIVE, "--data", "recall", "--steps", 1, "--out", tmp_path / "run"]
    train(*options, "--validation-segments", 2)
    printed = capsys.readouterr().out
    assert "the first 2 segments of every lane score nothing; give more --validation-segments" in printed
    assert f"saved in {tmp_path / 'run'}" in printed


def test_evaluation_reads_texts_shorter_than_a_segment(text, tmp_path, capsys):
    train("--data", text, "--steps", 1, "--out", tmp_path / "run", *TINY)
    (tmp_path / "short.txt").write_text("x" * 40)
    capsys.readouterr()
    evaluate(tmp_path / "run", "--data", tmp_path / "short.txt")
    assert "tokens scored       1\n" in capsys.readouterr().out


def test_options_of_another_model_are_named(capsys):
    for argv, words in (
        (["--model", "compressive", "--gate", "lstm"], "--gate is an option of --model block_recurrent"),
        (["--memory", 64], "--memory is an option of --model compressive"),
        (["--slots", 4], "--slots is an option of --model memformer"),
        (["--vectors", 2], "--vectors is an option of --model pretrained_recurrence"),
        (["--task-recall", 0.1], "--task-recall is an option of --model memformer"),
    ):
        with pytest.raises(SystemExit) as caught:
            train(*argv)
        printed = capsys.readouterr().err
        assert caught.value.code == 2 and words in printed and printed.count("\n") == 1


def test_the_seed_decides_everything(text, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train("--data", text, "--steps", 2, "--seed", seed, "--dropout", 0.1, "--out", tmp_path / name, *TINY)
    a, b, c = (saved(tmp_path / name)["parameters"]["embedding"] for name in "abc")
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_new_run_never_takes_an_old_ones_folder(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train("--data", text, "--steps", 1, *TINY)
    assert sorted(p.name for p in Path("runs").iterdir()) == ["block_recurrent-book-1", "block_recurrent-book-2"]
    before = checkpoint_path("runs/block_recurrent-book-1").read_bytes()
    with pytest.raises(InputError, match="already holds a run"):
        train("--data", text, "--steps", 1, "--out", "runs/block_recurrent-book-1", *TINY)
    assert checkpoint_path("runs/block_recurrent-book-1").read_bytes() == before


def test_sampling_continues_the_prompt(text, tmp_path, capsys):
    train("--data", text, "--steps", 1, "--out", tmp_path / "run", *TINY)
    capsys.readouterr()
    outs = []
    for seed in (3, 3, 4):
        evaluate(tmp_path / "run", "--sample", 40, "--prompt", "def forward(", "--seed", seed)
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2] and outs[0].startswith("def forward(")


def test_a_loss_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    def broken(model, segments, state, *_):
        return torch.tensor(float("nan")), state

    train("--data", text, "--steps", 2, "--out", tmp_path / "run", *TINY)
    monkeypatch.setitem(training_script.BACKPROP, "through_time", broken)
    with pytest.raises(InputError, match="loss is nan at step 3"):
        train("--resume", tmp_path / "run", "--steps", 5)
    assert saved(tmp_path / "run")["step"] == 2, "the last checkpoint stands"


@pytest.mark.parametrize(
    "case", ["run missing", "run truncated", "other shape", "negative sample", "prompt alone", "empty prompt"]
)
def test_evaluation_refuses_in_one_line(case, text, tmp_path):
    run = tmp_path / "run"
    train("--data", text, "--steps", 1, "--out", run, *TINY)
    path, argv = checkpoint_path(run), [run]
    if case == "run missing":
        shutil.rmtree(run)
    elif case == "run truncated":
        path.write_bytes(path.read_bytes()[:-2000])
    elif case == "other shape":
        contents = torch.load(path)
        contents["model_config"]["width"] = 24
        torch.save(contents, path)
    argv += {
        "negative sample": ["--sample", -1], "prompt alone": ["--prompt", "x"], "empty prompt": ["--sample", 2, "--prompt", ""],
    }.get(case, [])  # fmt: skip
    words = {
        "run missing": "no checkpoint", "run truncated": "truncated", "other shape": "does not fit",
        "negative sample": "--sample is -1", "prompt alone": "go with --sample", "empty prompt": "--prompt is empty",
    }[case]  # fmt: skip
    with pytest.raises(InputError, match=words) as caught:
        evaluate(*argv)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script,argv", [("train.py", ["--data", "nowhere"]), ("eval.py", ["nowhere"])])
def test_scripts_exit_with_2_and_one_line(script, argv):
    import subprocess

    done = subprocess.run([sys.executable, script, *argv], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith(f"{script}: "), done.stderr


def test_a_refused_run_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("in the way")
    for argv in (["--data", "nowhere"], ["--data", "recall", "--out", "file/run", "--steps", 1, *TINY]):
        with pytest.raises(InputError):
            train(*argv)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_readme_commands_pin_torch_and_make_their_environment():
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2 and all("torch==2.13.0" in line for line in lines)
    assert "train.py" in lines[0] and "pytest" in lines[1]
