"""The whole catalog of faults in three parts, of which CI runs the first."""

from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from launching import forked

from dit_lora.faults import phases
from dit_lora.faults.site import DEFAULT, site_of
from dit_lora.faults.suite import catalog, judge_all, totals

PARTS = 3


def judge_part(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third fault, from this one on, is named and recovered, and no file is poisoned."""
    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=forked))
    AcceleratorState._reset_state(reset_partial_state=True)
    site = site_of(DEFAULT)
    faults = catalog(site)[part::PARTS]
    results = list(judge_all(faults, site))
    failed = {one.name: one.why for one in results if not one.passed}
    assert not failed
    assert len(results) == len(faults) >= 40
    assert totals(results)["poisoned_files"] == 0
