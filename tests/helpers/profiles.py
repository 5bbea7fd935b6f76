"""How many examples a property is tried on, and whether they are the same each time: Hypothesis' profiles, for conftest.

`ci`, the default, tries the same 25 each time, `dev` others each time, `thorough` 2,000 others. Choose one by
`pytest --hypothesis-profile=NAME`, which comes after conftest's choice.
"""

from hypothesis import HealthCheck, settings

USUAL = 25

# what a profile does not say is Hypothesis' default, which is another where the variable CI is set
settings.register_profile("ci", deadline=None, max_examples=USUAL, print_blob=True, derandomize=True)
settings.register_profile("dev", deadline=None, max_examples=USUAL, print_blob=True, derandomize=False)
THOROUGH = {"max_examples": 2000, "derandomize": False, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("thorough", deadline=None, print_blob=True, **THOROUGH)


def examples(count: int) -> settings:
    """The settings of a property that needs another number than USUAL; `thorough` gives it as many as any other."""
    chosen = settings.default.max_examples
    return settings(max_examples=count if chosen == USUAL else chosen)
