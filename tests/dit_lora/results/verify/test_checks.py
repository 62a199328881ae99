"""Whether an update is more than rounding."""

import pytest

from dit_lora.adapters.update_norms import ModuleUpdate
from dit_lora.results.verify.checks import effect


@pytest.mark.parametrize(
    ("shares", "passed", "words"),
    [
        (
            (9e-23, 2e-24),
            False,
            "the updates of all 2 modules are lost in rounding (at most 9e-21%",
        ),
        ((0.0, 0.0), False, "the updates of all 2 modules are zero"),
        ((9e-23, 0.01), True, "dead, their update is zero or lost in rounding:\n  - to_0"),
        ((1e-7, 0.01), True, "2 modules, update 1e-05 to 1% of their weights"),
    ],
)
def test_an_update_that_rounding_takes_away_is_no_effect(
    shares: tuple[float, ...], passed: bool, words: str
) -> None:
    updates = [ModuleUpdate(f"to_{n}", 3 * x, x, x) for n, x in enumerate(shares)]
    check = effect(updates, ())
    assert check.passed is passed
    assert words in check.words
