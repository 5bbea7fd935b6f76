"""python -m tests.tools.mutate: what it names is there."""

from tests.tools.mutants import mutants_of
from tests.tools.mutate import EQUIVALENT, FILES, ROOT, TESTS, read_equivalent


def test_what_it_names_is_there():
    """Its files, its tests, and every explained survivor as a fault that can be planted."""
    assert [name for name in (*FILES, *TESTS) if not (ROOT / name).exists()] == []
    found = {(mutant.file, mutant.before, mutant.after) for file in FILES for mutant in mutants_of(ROOT, file)}
    explained = read_equivalent(EQUIVALENT)
    assert not explained.keys() - found and all(explained.values())
