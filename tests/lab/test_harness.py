"""What lm_eval is told of a model: of plain GPT-2 the numbers of its own model of transformers."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import accelerated
from tests.helpers.programs import MEMFORMER, as_json, printed, refused, train
from tests.helpers.reading import read_alone

lm_eval = pytest.importorskip("lm_eval", reason="the harness needs lm_eval: .[harness]")
transformers = pytest.importorskip("transformers", reason="its model needs transformers: .[all]")
tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer needs tokenizers: .[all]")

END = "<|endoftext|>"
TEXT = "He wrote on the page, scraped it, and wrote on the page again: the old lines came back. "
TEXTS = [TEXT, TEXT[:9], "", TEXT * 4]
PAIRS = [("", TEXT[:30]), (TEXT, "It was old"), (TEXT[:20] + " ", "page"), (TEXT * 3, " the end")]
SEGMENT = 24
DATA = ["--batch", 2, "--steps", 2]


def requests(rows):
    """lm_eval's requests, as its evaluator makes them."""
    return [SimpleNamespace(args=row if isinstance(row, tuple) else (row,)) for row in rows]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """(lm_eval's own model of a small random GPT-2, our HarnessModel of it, its folder)."""
    from lm_eval.models.huggingface import HFLM

    from accelerated.lab.harness import HarnessModel

    torch.manual_seed(3)
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("gpt2")
    learned = tokenizers.ByteLevelBPETokenizer()
    learned.train_from_iterator([TEXT], 300, special_tokens=["<pad>", END])
    learned.save_model(str(folder))
    size = learned.get_vocab_size()
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=SEGMENT, n_embd=32, n_layer=2, n_head=4
    )
    causal = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in causal.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    causal.save_pretrained(folder)
    files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = transformers.GPT2TokenizerFast(*files, bos_token=END, eos_token=END)
    theirs = HFLM(pretrained=causal.double(), tokenizer=tokenizer, batch_size=2)
    model, own, _ = accelerated.load(folder)
    return theirs, HarnessModel(model.double(), own, lanes=2, clear_memory=True), folder


@pytest.fixture
def task(tmp_path):
    """A folder with a task of two documents: the log-probability of a whole text."""
    rows = [json.dumps({"text": TEXT * count}) for count in (1, 4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    lines = ["task: old_lines", "dataset_path: json", "test_split: train"]
    lines += [f"dataset_kwargs: {{data_files: {tmp_path / 'texts.jsonl'}}}"]
    lines += ["output_type: loglikelihood_rolling", "doc_to_text: ''", "doc_to_target: '{{text}}'"]
    lines += ["metric_list: [{metric: bits_per_byte}]"]
    (tmp_path / "old_lines.yaml").write_text("\n".join(lines))
    return ["--tasks", "old_lines", "--task-files", tmp_path]


def test_log_probabilities_of_gpt2_are_those_of_lm_evals_own_model(sides):
    """Of whole texts in windows, and of continuations whose context may be too long for one."""
    theirs, ours, _ = sides
    assert theirs.max_length == SEGMENT < len(ours.tok_encode(TEXTS[3]))
    assert theirs.prefix_token_id == ours.prefix_token_id
    expected = theirs.loglikelihood_rolling(requests(TEXTS))
    actual = ours.loglikelihood_rolling(requests(TEXTS))
    assert actual == pytest.approx(expected, rel=1e-9)
    assert actual[2] == 0 and min(actual) < -100

    expected = theirs.loglikelihood(requests(PAIRS))
    actual = ours.loglikelihood(requests(PAIRS))
    assert [pair[0] for pair in actual] == pytest.approx([pair[0] for pair in expected], rel=1e-9)
    assert [pair[1] for pair in actual] == [pair[1] for pair in expected]


def test_the_likeliest_continuation_is_greedy_and_is_what_is_generated(sides):
    theirs, ours, _ = sides
    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    asked = requests([(TEXT[:20], dict(options)), (TEXT * 2, dict(options))])
    expected = theirs.generate_until(asked)
    actual = ours.generate_until(asked)
    assert actual == expected
    prompt = TEXT[:20]
    ids = ours.tok_encode(prompt)
    with torch.no_grad():
        logits = ours.model(torch.tensor([ids]), ours.model.initial_state(1)).logits
    likeliest = int(logits[0, -1].argmax())
    for token in (likeliest, (likeliest + 1) % logits.shape[-1]):
        [(_, greedy)] = ours._loglikelihood_tokens([("", ids, [token])])
        assert greedy == (token == likeliest)
    word = actual[0][2:5]
    [cut] = ours.generate_until(requests([(prompt, options | {"until": [word]})]))
    assert cut == actual[0][: actual[0].index(word)]


def test_a_task_is_scored_with_the_state_carried_or_as_lm_eval_cuts_it(task, tmp_path, capsys):
    """A run's bits per byte, by a text's sum of log p over its bytes, at both kinds of windows."""
    (tmp_path / "book.txt").write_text(TEXT * 60)
    train(*MEMFORMER, *DATA, "--data", tmp_path / "book.txt", "--out", tmp_path / "run")
    found = {}
    for words in ([], ["--clear-memory"]):
        record = as_json(capsys, "harness", tmp_path / "run", *task, *words)
        found[bool(words)] = record["results"]["old_lines"]["bits_per_byte,none"]
    model, tokenizer, _ = accelerated.load(tmp_path / "run")
    nats = 0.0
    for count in (1, 4):
        ids = tokenizer.encode("\n" + TEXT * count)
        for window, logits, _ in read_alone(model, ids[None, :-1]):
            targets = torch.tensor(ids[window.start + 1 : window.stop + 1]).long()
            nats += cross_entropy(logits[0], targets, reduction="sum").item()
    size = 5 * len(TEXT)
    assert found[False] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found[True] != pytest.approx(found[False], rel=1e-6)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": False, "temperature": 1}])
def test_a_task_that_does_not_sample_is_answered_greedily_whatever_its_temperature(sides, options):
    """lm_eval settles what a task's options mean; LongBench's have both."""
    _, ours, _ = sides
    asked = {"until": "", "max_new_tokens": 12}
    greedy = ours.continuation(TEXT[:20], asked)
    assert greedy
    assert ours.continuation(TEXT[:20], asked | options) == greedy


def test_a_text_begins_with_its_ends_token_or_any_that_the_tokenizer_has():
    """A SentencePiece vocabulary spells an end as </s>, and a line's end as nothing."""
    from accelerated.lab.harness import HarnessModel

    model = SimpleNamespace(config=SimpleNamespace(segment=SEGMENT))
    no_lines = SimpleNamespace(spellings=[b"<unk>", b"a"], encode=lambda text: np.array([], int))
    assert HarnessModel(model, no_lines).eot_token_id == 0
    no_lines.spellings.append(b"</s>")
    assert HarnessModel(model, no_lines).eot_token_id == 2


def test_documents_that_cannot_be_read_are_one_line(sides, task, tmp_path, capsys):
    (tmp_path / "texts.jsonl").unlink()
    words = refused(capsys, "harness", sides[2], *task)
    assert "--tasks old_lines: its documents cannot be read (" in words


def test_the_table_of_a_published_gpt2_and_an_unknown_task(sides, task, capsys):
    folder = sides[2]
    table = printed(capsys, "harness", folder, *task, "--limit", 1)
    assert "old_lines" in table and "bits_per_byte" in table
    unknown = refused(capsys, "harness", folder, "--tasks", "no_such", *task[2:])
    assert "--tasks no_such: " in unknown and "has no such task; give another" in unknown
