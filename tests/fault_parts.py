"""The whole catalog of faults in three parts, of which CI runs the first."""

from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from launching import forked

from benchmarks.faults import phases
from benchmarks.faults.suite import catalog, judge_all, totals
from benchmarks.faults.target_table import DEFAULT, targets_for

PARTS = 3


def judge_part(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third fault, from this one on, is named and recovered, and no file is poisoned."""
    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=forked))
    AcceleratorState._reset_state(reset_partial_state=True)
    targets = targets_for(DEFAULT)
    faults = catalog(targets)[part::PARTS]
    results = list(judge_all(faults, targets))
    failed = {result.name: result.why for result in results if not result.passed}
    assert not failed
    assert len(results) == len(faults) >= 40
    assert totals(results)["poisoned_files"] == 0
