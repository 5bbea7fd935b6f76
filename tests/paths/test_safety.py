"""A night's work is safe: nothing damaged is used, one process writes a run, results are kept, data may move."""

import base64
import json
import os
import random
import resource
import shutil
import subprocess
import sys

import pytest
import torch

import train as training_script
from accelerated import replay
from accelerated.data.lanes import Parts
from accelerated.data.windows import lengths_of
from accelerated.program.errors import InputError
from accelerated.training import opening
from accelerated.training.folder import checkpoint_path
from accelerated.training.log import read_metrics
from accelerated.training.options import parse as parse_training
from tests.helpers.programs import COMPRESSIVE, ROOT, differences, ended, evaluate, hanging, killed, saved, start, train

QUICK = ["--sample", 0, "--validation-segments", 2, "--log-every", 1]
SAFE = [*COMPRESSIVE, *QUICK, "--save-every", 1]


@pytest.fixture
def trained(text, tmp_path):
    """The folder of a run of two steps."""
    train(*SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def disk(tmp_path):
    """A disk of one megabyte, and a function that fills it but for so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk needs mount -t tmpfs; run the tests as root of a Linux machine or container")

    def fill(leaving):
        with open(place / "filler", "wb") as file:
            file.write(bytes(shutil.disk_usage(place).free - leaving))

    yield place, fill
    subprocess.run(["umount", place], check=True)


def flip(path, bit):
    """Flip a bit of a file."""
    with open(path, "rb+") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def some_bits(path, count):
    """The numbers of some bits of a file: the first, one of the end that says where the checksum is, the last, and others."""
    size, rng = 8 * path.stat().st_size, random.Random(path.name)
    return [0, size - 8 * 75, size - 1, *(rng.randrange(size) for _ in range(count - 3))]


def refusal(action, *argv):
    """The line in which train.py or eval.py refuses these arguments."""
    with pytest.raises(InputError) as caught:
        action(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusals(run):
    """The lines in which a run is refused to be resumed, to be begun from and to be evaluated."""
    init = ["--init", run, "--steps", 1, "--out", run.parent / "begun"]
    lines = refusal(train, "--resume", run, "--steps", 4), refusal(train, *init), refusal(evaluate, "score", run)
    assert not (run.parent / "begun").exists()
    return lines


def write_ranks(path, *merged):
    """Write a tokenizer of the 256 bytes and some longer tokens, in tiktoken's format."""
    tokens = [*(bytes([byte]) for byte in range(256)), *merged]
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def records(run, kind):
    """The records of a run's log that have this measurement."""
    return [record for record in read_metrics(run) if kind in record]


# Nothing damaged is used


def test_a_checkpoint_with_a_flipped_bit_is_refused_and_an_earlier_one_serves(trained, text, tmp_path):
    checkpoint = checkpoint_path(trained)
    for bit in some_bits(checkpoint, 12):
        flip(checkpoint, bit)
        for line in refusals(trained):
            assert str(checkpoint) in line and "remove it and copy an earlier step-N.pt" in line
        flip(checkpoint, bit)
    flip(checkpoint, 5_000)
    checkpoint.unlink()
    shutil.copyfile(trained / "step-1.pt", checkpoint)
    train("--resume", trained, "--steps", 4)
    train(*SAFE, "--data", text, "--steps", 4, "--out", tmp_path / "whole")
    assert not differences(tmp_path / "whole", trained, besides=["metrics.jsonl"])


def test_a_damaged_tokenizer_or_another_runs_is_refused(text, tmp_path):
    run, other = tmp_path / "run", write_ranks(tmp_path / "other", b"th", b"an")
    train(*SAFE, "--data", text, "--tokenizer", write_ranks(tmp_path / "ranks", b"th", b"he"), "--steps", 1, "--out", run)
    kept = run / "tokenizer.tiktoken"
    for bit in some_bits(kept, 12):
        flip(kept, bit)
        for line in refusals(run):
            assert str(kept) in line and "restore it" in line
        flip(kept, bit)
    shutil.copyfile(other, kept)
    for line in refusals(run):
        assert str(kept) in line and "is not the one that" in line and "was trained with" in line


def test_tokens_with_a_flipped_bit_are_refused(text, tmp_path):
    run, data_dir = tmp_path / "run", ["--data-dir", tmp_path / "data"]
    train(*SAFE, "--data", text, *data_dir, "--steps", 1, "--out", run)
    [tokens] = (tmp_path / "data").rglob("valid.tokens")
    flip(tokens, 77)
    for action, *argv in ((train, "--resume", run, "--steps", 2), (evaluate, "score", run)):
        line = refusal(action, *argv, *data_dir)
        assert line.startswith(f"{tokens.parent} is damaged (the checksum of valid.tokens is wrong); remove that folder")


# One process, one folder


def test_a_run_that_another_process_writes_is_refused_and_free_when_that_is_killed(text, tmp_path):
    """Its half-written files are not touched before."""
    run, options = tmp_path / "run", [*COMPRESSIVE, *QUICK, "--data", text, "--steps", 3, "--out", tmp_path / "run"]
    first = hanging(options, tmp_path, "train", "next_segments", call=2)
    stale = run / "step-7.pt.writing"
    stale.write_text("half")
    assert refusal(train, *options).startswith(f"another train.py is writing to {run}; wait until it ends, or give another")
    assert stale.exists() and killed(first)
    train(*options)
    assert saved(run)["step"] == 3 and not stale.exists()
    second = hanging(["--resume", run, "--steps", 9], tmp_path, "train", "log_means", call=2)
    assert refusal(train, "--resume", run, "--steps", 9).startswith(f"another train.py is writing to {run}; wait until")
    evaluate("score", run)
    assert killed(second)
    train("--resume", run, "--steps", 4)
    assert saved(run)["step"] == 4


def test_a_run_that_was_continued_after_the_options_were_read_is_refused(trained):
    read = parse_training(["--resume", str(trained), "--steps", "5"])
    train("--resume", trained, "--steps", 3)
    line = refusal(training_script.main, *read)
    assert line == f"another process has continued {trained} meanwhile; give the command again"
    assert saved(trained)["step"] == 3


def test_a_refused_beginning_leaves_the_folder_of_a_run_as_it_was(trained, text):
    before = {path: path.read_bytes() for path in trained.iterdir()}
    text.write_text("another text " * 900)
    assert "does not have the tokens" in refusal(train, "--resume", trained, "--steps", 3)
    assert {path: path.read_bytes() for path in trained.iterdir()} == before


# A full disk


def test_a_full_disk_keeps_the_last_checkpoint(text, tmp_path, disk):
    """A real one; the run continues when there is space again."""
    place, fill = disk
    run, options = place / "run", [*SAFE, "--data", text, "--data-dir", tmp_path / "data", "--keep", 1]
    train(*options, "--steps", 2, "--out", run)
    before = checkpoint_path(run).read_bytes()
    fill(leaving=len(before) // 2)
    line = refusal(train, "--resume", run, "--steps", 3, "--data-dir", tmp_path / "data")
    assert f"cannot write {checkpoint_path(run)}: " in line and "free some space, or an earlier checkpoint there stays" in line
    assert checkpoint_path(run).read_bytes() == before and not list(run.glob("*.writing"))
    (place / "filler").unlink()
    train("--resume", run, "--steps", 3, "--data-dir", tmp_path / "data")
    train(*options, "--steps", 3, "--out", tmp_path / "whole")
    assert saved(run)["step"] == 3 and [r["loss"] for r in records(run, "loss")] == [
        r["loss"] for r in records(tmp_path / "whole", "loss")
    ]


def test_a_full_disk_under_the_log_is_answered_in_one_line(text, tmp_path, disk):
    place, fill = disk
    options = [*COMPRESSIVE, *QUICK, "--data", text, "--data-dir", tmp_path / "data", "--out", place / "run"]
    fill(leaving=40_000)
    line = refusal(train, *options, "--steps", 400, "--save-every", 1000)
    assert line.startswith(f"cannot write {place / 'run' / 'metrics.jsonl'}: No space left on device; free some space, or make")


def test_a_full_output_is_answered_in_one_line_before_the_work(text, tmp_path):
    run, options = tmp_path / "run", [*SAFE, "--data", text, "--steps", 2]
    assert ended(start([*options, "--out", run], tmp_path / "errors", output="/dev/full")) == [2]
    line = "train.py: cannot write the output: No space left on device; send it elsewhere\n"
    assert (tmp_path / "errors").read_text() == line and not checkpoint_path(run).exists()
    train(*options, "--out", run)
    assert saved(run)["step"] == 2


def test_a_disk_that_may_not_be_written_is_not_said_to_be_full(trained, monkeypatch):
    before = checkpoint_path(trained).read_bytes()

    def denied(contents, file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "save", denied)
    line = refusal(train, "--resume", trained, "--steps", 3)
    assert line == f"cannot write {checkpoint_path(trained)}: Permission denied; an earlier checkpoint there stays as it was"
    assert checkpoint_path(trained).read_bytes() == before


def test_nan_before_the_first_checkpoint_says_that_nothing_was_saved(text, tmp_path, monkeypatch):
    broken = lambda model, segments, state, **_: (torch.tensor(float("nan")), {}, state)  # noqa: E731
    monkeypatch.setitem(replay.BACKPROP, "through_time", broken)
    line = refusal(train, *SAFE, "--data", text, "--steps", 2, "--out", tmp_path / "run")
    assert line == "the loss is nan at step 1; nothing was saved before; try a lower --learning-rate"


# Results


def test_the_settings_are_kept_as_json_and_renewed_when_a_run_is_resumed(trained, text):
    for steps in (2, 3):
        if steps == 3:
            train("--resume", trained, "--steps", 3, "--learning-rate", 0.5)
        settings, contents = json.loads((trained / "config.json").read_text()), saved(trained)
        assert settings["training_config"]["steps"] == steps and settings["data_config"]["data"] == str(text)
        assert settings == json.loads(json.dumps({name: contents[name] for name in settings}))
    assert settings["training_config"]["learning_rate"] == 0.5


def test_the_final_figures_are_kept_and_each_validation_says_whether_it_is_the_best(text, tmp_path, monkeypatch, capsys):
    bits, validate = iter([5.0, 3.0, 4.0]), training_script.validation_score
    options = [*SAFE, "--data", text, "--steps", 3, "--validate-every", 1, "--out", tmp_path / "run"]

    def scored(run, clear_memory=False):
        found = validate(run, clear_memory)
        return found if clear_memory else found._replace(nats=next(bits) * 0.6931471805599453 * found.text_bytes)

    monkeypatch.setattr(training_script, "validation_score", scored)
    train(*options)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    read = records(tmp_path / "run", "final")[0]["validation_tokens"]
    said = [(1, "5.000", "the best so far"), (2, "3.000", "the best so far"), (3, "4.000", "the best was 3.000")]
    assert printed == [f"step {step}: validation {value} bits per byte on {read} tokens; {best}" for step, value, best in said]
    last = read_metrics(tmp_path / "run")[-1]
    assert last["final"] is True and last["step"] == 3 and last["validation_bits_per_byte"] == pytest.approx(4.0)
    assert 0 < last["cleared_bits_per_byte"] < 99 and last["cleared_bits_per_byte"] != last["validation_bits_per_byte"]


# train.py and eval.py agree


@pytest.fixture
def uneven(tmp_path):
    """A folder of splits; the validation split's only book begins with digits, and then there is prose."""
    prose, rng = (ROOT / "reference" / "compressive.py").read_text(), random.Random(0)
    texts = {"train": prose, "valid": "".join(rng.choices("0123456789", k=1001)) + prose[:3000], "test": prose[:3000]}
    for split, text in texts.items():
        (tmp_path / "books" / split).mkdir(parents=True)
        (tmp_path / "books" / split / "book.txt").write_text(text)
    return tmp_path / "books"


def last_figure(run):
    """The validation score that a run ended with, in bits per byte."""
    return records(run, "final")[0]["validation_bits_per_byte"]


def evaluated(run, capsys):
    """What eval.py finds on the validation split, in bits per byte."""
    capsys.readouterr()
    evaluate("score", run, "--json")
    return json.loads(capsys.readouterr().out)["bits_per_byte"]


def test_the_whole_validation_split_has_the_score_that_eval_finds(uneven, tmp_path, capsys):
    train(*SAFE, "--validation-segments", 0, "--data", uneven, "--steps", 5, "--out", tmp_path / "run")
    assert last_figure(tmp_path / "run") == evaluated(tmp_path / "run", capsys)


def test_a_part_of_the_validation_split_is_read_from_all_over_it(uneven, tmp_path, monkeypatch, capsys):
    """Near the score of the whole split, which the first tokens alone are not; the same places in every run."""
    options = [*SAFE, "--batch", 12, "--validation-segments", 5, "--data", uneven, "--learning-rate", 0.01]
    found, spread = [], opening.spread
    monkeypatch.setattr(opening, "spread", lambda *given: found.append(spread(*given)) or found[-1])
    train(*options, "--steps", 39, "--out", tmp_path / "run")
    assert "validation reads 12.0% of its split, from all over it; --validation-segments 0 reads all" in capsys.readouterr().out
    train("--resume", tmp_path / "run", "--steps", 40)
    assert "validation on 480 tokens (12.0% of the split), bits per byte: " in capsys.readouterr().out
    assert found[0].spans == found[1].spans and lengths_of(found[0]).tolist() == [40] * 12
    whole, read = evaluated(tmp_path / "run", capsys), last_figure(tmp_path / "run")
    monkeypatch.setattr(opening, "spread", lambda documents, tokens, longest: Parts(documents, [(0, 0, tokens)]))
    train(*options, "--steps", 39, "--out", tmp_path / "first")
    train("--resume", tmp_path / "first", "--steps", 40)
    print(whole, read, last_figure(tmp_path / "first"))
    assert evaluated(tmp_path / "first", capsys) == whole, "the same model"
    assert abs(read - whole) < 0.15 < 0.5 < abs(last_figure(tmp_path / "first") - whole)


def test_recall_documents_are_validated_whole(tmp_path, monkeypatch):
    found, spread = [], opening.spread
    monkeypatch.setattr(opening, "spread", lambda *given: found.append((given[0], spread(*given))) or found[-1][1])
    train(*COMPRESSIVE, *QUICK, "--data", "recall", "--recall-distance", 40, "--steps", 1, "--out", tmp_path / "run")
    [(documents, read)] = found
    assert 0 < len(read) < len(documents) and set(lengths_of(read)) == set(lengths_of(documents))


# Data that moves


@pytest.fixture
def moving(tmp_path, monkeypatch):
    """A book in a folder in which train.py begins with a relative path; then it is in another folder. Returns the book's path."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    book = tmp_path / "here" / "book.txt"
    book.write_bytes((ROOT / "reference" / "memformer.py").read_bytes())
    monkeypatch.chdir(tmp_path / "here")
    return book


def test_a_relative_path_is_kept_as_an_absolute_one(moving, tmp_path, monkeypatch):
    train(*SAFE, "--data", "book.txt", "--steps", 1, "--out", tmp_path / "run")
    monkeypatch.chdir(tmp_path / "there")
    train("--resume", tmp_path / "run", "--steps", 2)
    evaluate("score", tmp_path / "run")
    assert saved(tmp_path / "run")["data_config"]["data"] == str(moving) and saved(tmp_path / "run")["step"] == 2


@pytest.mark.parametrize("folder", [False, True])
def test_a_run_whose_data_has_moved_continues_with_its_new_place(moving, tmp_path, folder):
    old, run = moving.parent if folder else moving, tmp_path / "run"
    train(*SAFE, "--data", old, "--steps", 4, "--out", tmp_path / "whole")
    train(*SAFE, "--data", old, "--steps", 2, "--out", run)
    os.chdir(tmp_path)
    new = old.rename(tmp_path / "new")
    line = refusal(train, "--resume", run, "--steps", 4)
    assert line == f"{old}, which {run} was trained on, is not there; if it has moved, give --data with its new place"
    other = tmp_path / "other.txt"
    other.write_text("another text " * 900)
    assert "does not have the tokens that" in refusal(train, "--resume", run, "--steps", 4, "--data", other)
    train("--resume", run, "--steps", 4, "--data", new)
    assert not differences(tmp_path / "whole", run, besides=["data_config", "metrics.jsonl"])
    assert records(run, "loss")[-1]["loss"] == records(tmp_path / "whole", "loss")[-1]["loss"]
    assert saved(run)["data_config"]["data"] == str(new) == json.loads((run / "config.json").read_text())["data_config"]["data"]
    train("--resume", run, "--steps", 5)


# Mistakes cost no time


def seconds_and_modules(script, *argv):
    """What a script prints, the CPU seconds it takes, and which of the slow modules it imports."""
    program = (
        "import atexit, runpy, sys\n"
        f"sys.argv = {[script, *map(str, argv)]!r}\n"
        "slow = ('torch', 'tiktoken', 'tokenizers', 'datasets', 'matplotlib')\n"
        "atexit.register(lambda: print([name for name in slow if name in sys.modules], file=sys.stderr))\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("argv,code", [(["--typo", 3], 2), (["--help"], 0), (["--model", "memformer", "--layers", 1], 2)])
def test_mistakes_and_help_are_answered_without_torch(argv, code):
    runs = [seconds_and_modules("train.py", *argv) for _ in range(3)]
    assert all(done.returncode == code and done.stderr.splitlines()[-1] == "[]" for done, _ in runs), runs[0][0].stderr
    assert sorted(seconds for _, seconds in runs)[1] < 1.0


def test_an_unknown_option_is_refused_before_the_run_is_read(trained):
    done, _ = seconds_and_modules("train.py", "--resume", trained, "--typo", 3)
    said = "train.py: unknown option --typo; did you mean --dtype? --help lists all"
    assert done.returncode == 2 and done.stderr.splitlines() == [said, "[]"]


def test_a_model_of_two_stacks_names_its_options_of_layers(capsys):
    with pytest.raises(SystemExit):
        parse_training(["--model", "memformer", "--layers", "1"])
    printed = capsys.readouterr().err
    assert "--encoder-layers" in printed and "--decoder-layers" in printed and printed.count("\n") == 1


def test_a_warm_up_that_does_not_end_gives_a_warning(text, tmp_path, capsys):
    for warmup in (2, 3):
        train(*SAFE, "--data", text, "--steps", 2, "--warmup", warmup, "--out", tmp_path / str(warmup))
        assert ("warning: --warmup 3 is longer than --steps 2" in capsys.readouterr().err) == (warmup == 3)
