"""docs/vectors: made again they are the same. Whether they are right, other tests say."""

import hashlib
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from docs.ports import archive
from reference import check, vectors
from tests.start_here.strategies import accepted, choices
from tests.tools.cases import EVERY_CASE, VARIANTS, config_of
from tests.tools.vectors import FOLDER, case_file, operators_file

every_case = pytest.mark.parametrize(
    "paper,name", EVERY_CASE, ids=[" ".join(pair) for pair in EVERY_CASE]
)


def values_owed(config):
    """{field: what it must be in some case} of every choice, switch, and number that may be zero.

    A tuple that may be empty must be empty in one case and not in another.
    """
    owed = {}
    for field, value in vars(config).items():
        if isinstance(value, str):
            owed[field] = {*choices(config, field)}
        elif isinstance(value, bool):
            owed[field] = {False, True}
        elif isinstance(value, (int, tuple)):
            nothing = type(value)()
            owed[field] = {True, not accepted(config, field, [nothing])}
    return owed


@pytest.mark.parametrize("paper", VARIANTS)
def test_every_value_of_every_field_stands_in_a_case(paper):
    """True stands for a number or a tuple that is not 0 or empty. A port can check what has one."""
    configs = [config_of(paper, name) for name in VARIANTS[paper]]
    for field, owed in values_owed(configs[0]).items():
        kind = str if isinstance(getattr(configs[0], field), str) else bool
        found = {kind(getattr(config, field)) for config in configs}
        assert found >= owed, (
            f"no case of {paper} in tests/tools/cases.txt has a {field} of {owed - found}"
        )


def test_a_rate_need_not_divide_the_segment():
    """Compressive's newest N mod c rows are cut off."""
    configs = [config_of("compressive", name) for name in VARIANTS["compressive"]]
    assert any(config.segment % config.compression_rate for config in configs), (
        "no case of compressive has a rate that leaves rows over"
    )


@every_case
def test_a_file_is_what_its_command_writes(paper, name):
    """And its tensors are in the order of computation."""
    is_written(FOLDER / paper / f"{name}.safetensors", *case_file(paper, name))


@pytest.mark.parametrize("paper", VARIANTS)
def test_operators_are_what_their_command_writes(paper):
    """Each has a result, and gradients of a result that arrives."""
    rows, about = operators_file(paper)
    is_written(FOLDER / "operators" / f"{paper}.safetensors", rows, about)
    for key in rows:
        is_distance = key.endswith("/distance")  # the only other result whose name begins with d
        if re.match("operator/.*/d", key) and not is_distance:
            function = key.split("/")[1]
            assert any(key.startswith(f"given/operator/{function}/d") for key in rows), key


def is_written(path, rows, about):
    """Assert that a file holds these rows, in their order, and what stands beside them."""
    rows = {key: row for key, row in rows.items() if row.size}
    held, metadata = check.load(path)
    about = json.loads(json.dumps(about))
    assert json.loads(path.with_suffix(".json").read_text()) == about
    assert json.loads(metadata["config"]) == about["config"]
    assert metadata["version"] == str(check.VERSION)
    assert [*rows] == [*held]
    for key, row in rows.items():
        assert row.dtype == held[key].dtype
        assert np.isfinite(row).all(), key
        assert str(row.dtype) in ("float64", "int64", "bool"), key
        np.testing.assert_allclose(row, held[key], rtol=1e-9, atol=1e-12, err_msg=key, strict=True)


def test_every_file_is_a_case_and_together_they_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    kinds = ("safetensors", "json")
    cases = {f"{paper}/{name}.{kind}" for paper, name in EVERY_CASE for kind in kinds}
    cases |= {f"operators/{paper}.{kind}" for paper in VARIANTS for kind in kinds}
    assert {path.relative_to(FOLDER).as_posix() for path in files} == {
        *cases,
        "hints.json",
        "rules.json",
        "manifest.json",
    }
    assert sum(path.stat().st_size for path in files) <= 4_000_000


def test_a_seed_draws_vectors_of_its_own(tmp_path):
    """The same seed the same ones; of any config, here one whose layers have fewer keys."""
    config = '{"layers": 2, "memories": [12, 3, 5, 0], "width": 6, "memory": 12}'
    command = ["--model", "compressive", "--config", config, "--out"]
    logits = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        file = tmp_path / f"{name}.safetensors"
        assert vectors.main([*command, str(file), "--seed", str(seed)]) == 0
        logits.append(check.load(file)[0]["0/logits"])
    assert np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


def test_the_manifest_is_what_its_command_writes():
    assert (FOLDER / archive.MANIFEST).read_text() == archive.as_text(archive.manifest(FOLDER))


@pytest.mark.parametrize("options,dtype", [([], "float64"), (["--float32"], "float32")])
def test_the_archive_is_all_that_a_ci_needs(options, dtype, tmp_path, capsys):
    """docs/ports/ci.md: a port, which here writes what is asked for, is checked by the copies."""
    assert archive.main([str(tmp_path / "vectors.zip"), *options]) == 0
    assert archive.main([str(tmp_path / "vectors.zip")]) == 2, "nothing is overwritten"
    with zipfile.ZipFile(tmp_path / "vectors.zip") as packed:
        packed.extractall(tmp_path / "vectors")
    copy = tmp_path / "vectors"
    about = json.loads((copy / "manifest.json").read_text())
    assert about["version"] == check.VERSION and "MIT" in about["licence"]
    assert (copy / "LICENSE").exists() and (copy / "rules.json").exists()
    for name, each in about["files"].items():
        content = (copy / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == each["sha256"]
    rows, _ = check.load(copy / "memorizing" / "retrieval.safetensors")
    assert rows["0/logits"].dtype == dtype
    assert (copy / "check.py").read_bytes() == Path(check.__file__).read_bytes()
    capsys.readouterr()
    assert check.main(["--strict", *[str(copy / "memorizing")] * 2]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "all agree: vectors 1, memorizing, level steps"
