"""docs/public.md: what it says of public packages is what their adapters find."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

ADAPTERS = sorted(ROOT.glob("docs/ports/public/[!w]*.py"))
SECTIONS = (ROOT / "docs" / "public.md").read_text().split("\n## ")


def test_every_adapter_has_a_section():
    commands = re.findall(r"Release .*`python -m docs\.ports\.public\.(\w+)`", "\n".join(SECTIONS))
    assert sorted(commands) == [path.stem for path in ADAPTERS]


@pytest.mark.parametrize("adapter", [path.stem for path in ADAPTERS])
def test_the_page_names_the_tensors_that_differ(adapter):
    command = [sys.executable, "-m", f"docs.ports.public.{adapter}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 2:
        assert run.stderr.count("\n") == 1, "a package that is missing should take one line"
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    found = re.findall(r"^  (\S.*?)  .*  differs$", run.stdout, re.M)
    (section,) = (text for text in SECTIONS if f"public.{adapter}`" in text)
    told = re.findall(r"^\| `(.*?)` \| .* \| (?:choice|mistake) \|$", section, re.M)
    assert told == found, f"docs/public.md tells of {told}, {' '.join(command[1:])} finds {found}"
