"""Models leave: as a program of torch alone, and as a model of the package transformers."""

import json
import re

import pytest
import torch

import accelerated
from accelerated.export.program import exported_program
from accelerated.models import NAMES
from tests.helpers.programs import evaluate
from tests.helpers.variants import PAPERS

LANES = 3  # the program's example has two


@pytest.mark.parametrize("name", NAMES)
def test_a_program_reads_segment_after_segment_in_any_number_of_lanes(name, tmp_path):
    """Only torch's own classes go in and come out, so another program needs nothing of ours."""
    paper = PAPERS[name]
    model = paper.random_model(paper.small)
    torch.export.save(exported_program(model), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    expected = model.initial_state(LANES)
    state = list(expected)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(3):
            shape = (LANES, paper.small.segment)
            tokens = torch.randint(paper.small.vocabulary, shape, generator=generator)
            logits, expected, _ = model(tokens, expected)
            given, *state = program(tokens, *state)
            torch.testing.assert_close(given, logits)
            torch.testing.assert_close(state, list(expected))
    assert tuple(model.state_shapes(1)) == expected._fields, "README.md gives them in this order"


def test_an_exported_folder_says_how_its_program_is_used(runs, tmp_path, monkeypatch):
    """The code in its README runs as it stands."""
    evaluate("export", runs.memformer, tmp_path / "folder", "--program")
    monkeypatch.chdir(tmp_path / "folder")
    code = re.search(r"```python\n(.*?)```", (tmp_path / "folder" / "README.md").read_text(), re.S)
    model = accelerated.load(runs.memformer).model
    tokens = torch.arange(2 * 16).view(2, 16)
    names = {"lanes": 2, "tokens": tokens}
    with torch.no_grad():
        exec(code[1], names)
        state = model.initial_state(2)
        for segment in tokens.split(8, dim=1):
            logits, state, _ = model(segment, state)
    torch.testing.assert_close(names["logits"], logits)


@pytest.fixture(params=["memformer", "windowed"])
def folder(request, runs, tmp_path):
    """The exported folder of a run; one reads windows that overlap."""
    evaluate("export", getattr(runs, request.param), tmp_path / "folder")
    return tmp_path / "folder"


def test_transformers_opens_a_run_with_its_state(folder, monkeypatch):
    """Its logits are ours, of one window or several, and it continues a text as we do."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_MODULES_CACHE", str(folder.parent / "cache"))
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model, tokenizer, _ = accelerated.load(folder)
    segment = model.config.segment
    overlap = getattr(model.config, "overlap", 0)
    step = segment - overlap
    tokens = torch.arange(2 * (segment + 2 * step)).view(2, -1)
    with torch.no_grad():
        state = model.initial_state(2)
        rows = []
        for start in (0, step, 2 * step):
            logits, state, _ = model(tokens[:, start : start + segment], state)
            rows.append(logits[:, overlap if start else 0 :])
        first = opened(tokens[:, :segment])
        rest = opened(tokens[:, step:], state=first.state)
    torch.testing.assert_close(first.logits, rows[0])
    torch.testing.assert_close(rest.logits[:, overlap:], torch.cat(rows[1:], 1))
    torch.testing.assert_close(list(rest.state), list(state))

    prompt = tokenizer.encode("def a(").tolist()
    continued = opened.generate(torch.tensor([prompt]), max_new_tokens=12)
    ours = accelerated.generate(model, tokenizer, "def a(", tokens=12, temperature=0)
    decoded = tokenizer.decode(continued[0, len(prompt) :]).decode("utf-8", errors="replace")
    assert decoded == ours
    drawn = opened.generate(torch.tensor([prompt]), 12, do_sample=True, top_p=1e-9)
    assert torch.equal(drawn, continued), "only the most probable token is in the nucleus"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "palimpsest"
