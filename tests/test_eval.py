"""eval.py's measures, its JSON and its sampling, as a user runs them."""

import json
import math
import re

import pytest
import torch
from test_command_line import COMPRESSIVE, MEMFORMER, TINY, WINDOWED, evaluate, saved, text, train  # noqa: F401

import eval as evaluation_script
from accelerated.data import named_sets as datasets
from accelerated.errors import InputError, run_program

BRIEF = ["--sample", 0, "--validation-segments", 2, "--steps", 2]


@pytest.fixture
def run(text, tmp_path):  # noqa: F811
    train("--data", text, *TINY, *BRIEF, "--out", tmp_path / "run")
    return tmp_path / "run"


def as_json(capsys, *argv):
    capsys.readouterr()
    evaluate(*argv, "--json")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def printed(capsys, *argv):
    capsys.readouterr()
    evaluate(*argv)
    return capsys.readouterr().out


def test_json_holds_what_is_printed(run, text, capsys):  # noqa: F811
    lines, record = printed(capsys, run), as_json(capsys, run)
    for name, key, digits in (("bits per byte", "bits_per_byte", 4), ("per word", "word_perplexity", None),
                              ("tokens scored", "tokens", 0), ("log-probability", "nats", 2)):  # fmt: skip
        shown = float(re.search(f"^{name} +(\\S+)", lines, re.M)[1])
        if digits is None:
            assert float(f"{record[key]:.5g}") == shown
        else:
            assert round(abs(record[key]), digits) == abs(shown)
    assert record["run"] == str(run) and record["step"] == 2 and record["split"] == "valid" and record["data"] == str(text)
    assert record["config"]["width"] == 16 and record["words_are"] == "counted between white space"
    assert record["word_perplexity"] == pytest.approx(math.exp(record["nats"] / record["words"]))
    cleared = as_json(capsys, run, "--clear-memory")
    assert cleared["memory_cleared"] and cleared["nats"] != record["nats"]


def test_official_word_counts_are_used_and_named(run, text, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(datasets, "OFFICIAL_WORDS", {(str(text), "valid"): 1000, ("pg19", "valid"): 7})
    record = as_json(capsys, run)
    assert record["words"] == 1000 and record["words_are"] == "official count"
    assert record["word_perplexity"] == pytest.approx(math.exp(record["nats"] / 1000))
    assert "1000 words of the original text, official count" in printed(capsys, run)
    assert as_json(capsys, run, "--split", "test")["words_are"] == "counted between white space"
    monkeypatch.undo()
    assert datasets.words_of_split("wikitext-103", "test", []) == (245_569, "official count")


def test_the_table_of_overlaps_counts_words_officially_too(text, tmp_path, capsys, monkeypatch):  # noqa: F811
    train(*WINDOWED, "--data", text, *BRIEF, "--out", tmp_path / "run")
    monkeypatch.setattr(datasets, "OFFICIAL_WORDS", {(str(text), "test"): 5})
    splits = as_json(capsys, tmp_path / "run", "--overlap", "own")["rows"][0]["splits"]
    assert splits["test"]["words"] == 5 and splits["valid"]["words"] > 50 and splits["test"]["word_perplexity"] is None
    lines = printed(capsys, tmp_path / "run", "--overlap", "own")
    assert "test 5 (official count)" in lines and "(counted between white space), " in lines


def test_recall_is_not_read_with_tokens_that_are_no_bytes(text, tmp_path):  # noqa: F811
    pytest.importorskip("tokenizers", reason="learning needs the extra bpe: tokenizers")
    train("--data", text, *TINY, *BRIEF, "--train-bpe", 300, "--out", tmp_path / "run")
    with pytest.raises(InputError, match=r"--data recall is made of bytes, the run's tokenizer is .*; give other --data"):
        evaluate(tmp_path / "run", "--data", "recall")


def test_text_that_changed_since_training_is_said(run, text, capsys):  # noqa: F811
    evaluate(run)
    assert "warning" not in capsys.readouterr().err
    text.write_bytes(text.read_bytes() + b"more")
    evaluate(run)
    assert f"warning: {text} is no longer what the run was trained on" in capsys.readouterr().err


def test_running_out_of_memory_is_one_line(monkeypatch, capsys):
    def fill(argv):
        torch.empty(2**50, dtype=torch.float32)

    with pytest.raises(SystemExit) as caught:
        run_program("eval.py", fill)
    line = capsys.readouterr().err
    assert caught.value.code == 2 and line.startswith("eval.py: out of memory; give a smaller --batch") and line.count("\n") == 1
    with pytest.raises(RuntimeError, match="other"):
        run_program("eval.py", lambda argv: (_ for _ in ()).throw(RuntimeError("other")))


def test_infinity_is_null_in_json(run, capsys, monkeypatch):
    monkeypatch.setattr(datasets, "OFFICIAL_WORDS", {(saved(run)["data_config"]["data"], "valid"): 1})
    assert as_json(capsys, run)["word_perplexity"] is None


def test_loss_by_position(run, capsys, tmp_path):
    record, plain = as_json(capsys, run, "--by-position"), as_json(capsys, run)
    carried, cleared = record["by_position"]["memory_carried"], record["by_position"]["cleared"]
    assert [row["start"] for row in carried][:4] == [0, 16, 32, 64] and record["attention_reach"] == 16
    assert sum(row["nats"] for row in carried) == pytest.approx(plain["nats"], rel=1e-6)
    assert sum(row["nats"] for row in cleared) == pytest.approx(as_json(capsys, run, "--clear-memory")["nats"], rel=1e-6)
    assert carried[0]["nats"] == pytest.approx(cleared[0]["nats"], rel=1e-6) and carried[1]["nats"] != cleared[1]["nats"]
    pytest.importorskip("matplotlib", reason="plots need the extra plot: matplotlib")
    lines = printed(capsys, run, "--by-position", "--plot", tmp_path / "a.png")
    assert "attention reaches 16 tokens back" in lines and "memory carried" in lines
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_loss_by_position_of_a_model_that_carries_nothing(text, tmp_path, capsys):  # noqa: F811
    train(*WINDOWED, "--vectors", 0, "--data", text, *BRIEF, "--out", tmp_path / "plain")
    record = as_json(capsys, tmp_path / "plain", "--by-position")
    assert list(record["by_position"]) == ["memory_carried"]


def test_perplexity_by_frequency(run, text, capsys, tmp_path):  # noqa: F811
    record, plain = as_json(capsys, run, "--by-frequency"), as_json(capsys, run)
    rows = record["by_frequency"]
    assert [row["name"] for row in rows] == ["more than 10,000", "1,000 to 10,000", "100 to 999", "fewer than 100", "all"]
    assert rows[-1]["nats"] == pytest.approx(plain["nats"], rel=1e-6) and sum(r["words"] for r in rows[:-1]) == rows[-1]["words"]
    content = text.read_bytes()
    training = content[: len(content) * 90 // 100].split()
    valid = content[len(content) * 90 // 100 : len(content) * 95 // 100].split()
    common = [word for word in valid if training.count(word) >= 100]
    assert abs(rows[2]["words"] - len(common)) <= 1 and common
    other = tmp_path / "other.txt"
    other.write_text("def = return if " * 99)
    rows = as_json(capsys, run, "--by-frequency", "--data", other)["by_frequency"]
    assert rows[2]["words"] > 0, "how often words stand in what the run was trained on"
    pytest.importorskip("matplotlib", reason="plots need the extra plot: matplotlib")
    assert "perplexity per word" in printed(capsys, run, "--by-frequency", "--plot", tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_dynamic_evaluation_goes_on_with_the_runs_optimiser(run, capsys, monkeypatch):
    seen, evaluate_dynamically = [], evaluation_script.evaluate_dynamically

    def watch(model, documents, tokenizer, lanes, optimizer, clip):
        seen.append(
            (optimizer.param_groups[0]["lr"], len(optimizer.state), clip, next(iter(optimizer.state.values()))["step"].item())
        )
        return evaluate_dynamically(model, documents, tokenizer, lanes, optimizer, clip)

    monkeypatch.setattr(evaluation_script, "evaluate_dynamically", watch)
    before = (run / "checkpoint.pt").read_bytes()
    record, plain = as_json(capsys, run, "--dynamic-evaluation", 0.002), as_json(capsys, run)
    assert record["static"]["nats"] == pytest.approx(plain["nats"], rel=1e-6)
    assert record["dynamic"]["nats"] < record["static"]["nats"], "a model that has hardly been trained learns on the way"
    [(rate, states, clip, steps)] = seen
    assert rate == 0.002 and states == len(saved(run)["parameters"]) and clip == 1.0 and steps == 2
    lines = printed(capsys, run, "--dynamic-evaluation", 1e-12)
    static, dynamic = re.findall(r"log-probability +(\S+)", lines)
    assert float(static) == pytest.approx(float(dynamic), rel=1e-4) and "with dynamic evaluation at 1e-12:" in lines
    assert (run / "checkpoint.pt").read_bytes() == before


def test_other_measures_are_json_too(text, tmp_path, capsys):  # noqa: F811
    train(*MEMFORMER, "--data", text, *BRIEF, "--out", tmp_path / "m")
    rows = as_json(capsys, tmp_path / "m", "--temporal-range", 3)["temporal_range"]
    assert [row["segments"] for row in rows] == [0, 1, 2] and all(row["bits_per_byte"] > 0 for row in rows)
    train(*COMPRESSIVE, "--data", text, *BRIEF, "--out", tmp_path / "c")
    record = as_json(capsys, tmp_path / "c", "--attention-buckets", "--sequences", 20)
    assert {part: len(row["mean"]) for part, row in record["attention"].items()} == dict.fromkeys(record["attention"], 6)
    assert sum(sum(row["mean"]) for row in record["attention"].values()) == pytest.approx(1, abs=1e-3)
    assert len(as_json(capsys, tmp_path / "c", "--compression-by-layer", "--sequences", 20)["attention_reconstruction_loss"]) == 2
    train(*WINDOWED, "--data", text, *BRIEF, "--out", tmp_path / "w")
    rows = as_json(capsys, tmp_path / "w", "--overlap", "0,3")["rows"]
    assert [row["config"]["overlap"] for row in rows] == [0, 3] and rows[1]["notes"] == ["trained with overlap 0"]
    plain = as_json(capsys, tmp_path / "w")
    assert rows[0]["splits"]["valid"]["nats"] == pytest.approx(plain["nats"], rel=1e-9)


def test_samples_stream_and_come_from_files(run, tmp_path, capsys, monkeypatch):
    shown = []
    monkeypatch.setattr("builtins.print", lambda *parts, **how: shown.append((parts, how.get("flush"))))
    evaluate(run, "--sample", 5, "--prompt", "def ", "--temperature", 0)
    monkeypatch.undo()
    assert len(shown) >= 6 and all(flush for _, flush in shown[:-1]), "a token at a time"
    streamed = "".join(parts[0] for parts, _ in shown[:-1])
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("def é".encode()[:-1])
    whole = as_json(capsys, run, "--sample", 5, "--prompt", "def ", "--temperature", 0)
    assert whole["prompt"] + whole["continuation"] == streamed
    assert printed(capsys, run, "--sample", 5, "--prompt-file", prompt).startswith("def ")
    long = tmp_path / "long.txt"
    long.write_bytes(b"word " * 100)
    assert as_json(capsys, run, "--sample", 2, "--prompt-file", long)["prompt"] == "word " * 100


def test_top_k_and_top_p_reach_the_sampling(run, capsys):
    greedy = as_json(capsys, run, "--sample", 20, "--temperature", 0)
    for option in (["--top-k", 1], ["--top-p", 1e-9]):
        assert as_json(capsys, run, "--sample", 20, "--temperature", 1, *option) == greedy
    assert as_json(capsys, run, "--sample", 20, "--temperature", 1) != greedy


@pytest.mark.parametrize(
    "argv,words",
    [
        (["--by-position", "--by-frequency"], "each replace the evaluation; give one"),
        (["--by-position", "--clear-memory"], "--clear-memory leaves --by-position nothing to look into"),
        (["--by-position", "--plot", "a.xyz"], r"cannot draw a.xyz: give a name that ends in one of .*\.png"),
        (["--by-position", "--plot", "nowhere/a.png"], "there is no folder nowhere"),
        (["--sample", 2, "--temperature", 1e-320], "give 0 for the most probable token, or at least 0.001"),
        (["--sample", 2, "--temperature", 0, "--top-p", 0.5], "--temperature 0 takes the most probable token"),
        (["--data", "recall", "--sample", 2], "reads --prompt and no documents"),
        (["--plot", "a.png"], "--plot goes with --by-position or --by-frequency"),
        (["--dynamic-evaluation", 0], "--dynamic-evaluation is 0.0; it must be a positive learning rate"),
        (["--dynamic-evaluation", "nan"], "it must be a positive learning rate"),
        (["--sample", 2, "--top-p", 0], "--top-p is 0.0; it must be above 0 and at most 1"),
        (["--sample", 2, "--top-p", 1.5], "at most 1"), (["--sample", 2, "--top-k", 0], "--top-k is 0; it must be at least 1"),
        (["--sample", 2, "--temperature", "nan"], "--temperature is nan"),
        (["--top-k", 3], "go with --sample N"), (["--prompt-file", "x"], "go with --sample N"),
        (["--sample", 2, "--prompt", "a", "--prompt-file", "b"], "each say what to continue"),
        (["--sample", 2, "--prompt-file", "nowhere"], "cannot read --prompt-file nowhere: No such file"),
        (["--checkpoint", "best"], "--checkpoint best: .* has last, step-2"),
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(run, argv, words, monkeypatch):
    monkeypatch.setattr(evaluation_script, "load_corpus", lambda *_: pytest.fail("data was touched"))
    with pytest.raises(InputError, match=words) as caught:
        evaluate(run, *argv)
    assert "\n" not in str(caught.value)


def test_words_are_needed_for_their_frequency(tmp_path):
    train(*WINDOWED, "--data", "recall", "--recall-distance", 8, *BRIEF, "--out", tmp_path / "run")
    with pytest.raises(InputError, match="--by-frequency: recall has no words"):
        evaluate(tmp_path / "run", "--by-frequency")


def test_an_empty_prompt_file_is_refused(run, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(InputError, match="is empty; give at least one character"):
        evaluate(run, "--sample", 2, "--prompt-file", tmp_path / "empty")


def test_the_checkpoint_is_that_of_its_step(text, tmp_path, capsys):  # noqa: F811
    train("--data", text, *TINY, *BRIEF, "--save-every", 1, "--keep", 2, "--out", tmp_path / "run")
    first, last = (as_json(capsys, tmp_path / "run", "--checkpoint", name) for name in ("step-1", "last"))
    assert (first["step"], last["step"]) == (1, 2) and first["nats"] != last["nats"]
    assert torch.load(tmp_path / "run" / "step-1.pt", weights_only=True)["step"] == 1
