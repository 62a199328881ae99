"""What other ranks make of a micro-batch that fails on one."""

from collections.abc import Sequence

import pytest

from dit_lora.guard.diagnosis import Cause, Diagnosis
from dit_lora.training.recovery.cross_rank_replay import _conclude_from_outcomes

OK, BAD, FULL = True, False, None
DATA = Diagnosis("data", "it fails whatever is switched off", 4, 1, 0, sample_ids=("b.mp4",))


@pytest.mark.parametrize(
    ("outcomes", "cause", "blamed"),
    [
        ([[BAD], [BAD]], "data", ("b.mp4",)),
        ([[OK] * 9, [BAD] * 9], "rank", ()),
        ([[OK] * 9, [BAD] * 8 + [OK]], "transient", ()),
        ([[OK] * 9, [OK] * 9], "transient", ()),
        ([[BAD], [FULL]], "unknown", ("b.mp4",)),
        ([[FULL], [FULL]], "unknown", ("b.mp4",)),
        ([[OK] * 9, [FULL] * 9], "unknown", ("b.mp4",)),
    ],
)
def test_a_sample_is_at_fault_only_where_it_fails_on_every_rank(
    outcomes: Sequence[Sequence[bool | None]], cause: Cause, blamed: tuple[str, ...]
) -> None:
    """A rank that is out of memory has no evidence: `unknown`, which drops no sample permanently."""
    diagnosis = _conclude_from_outcomes(DATA, outcomes)
    assert (diagnosis.cause, diagnosis.sample_ids) == (cause, blamed)
    assert ("does not fit into memory" in diagnosis.message) is (cause == "unknown")
