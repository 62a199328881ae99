"""The whole catalog of faults in two parts: CI runs the first, which has every cause with every action it leads to."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from launching import forked

from benchmarks.faults import altered, loop_damage, loop_kinds, loops, phases
from benchmarks.faults.fault import Fault
from benchmarks.faults.suite import catalog, judge_all, totals
from benchmarks.faults.target_table import DEFAULT, targets_for

_APART = {
    **{fault.name: "a loop of others" for fault in (*loops.FAULTS, *loop_kinds.FAULTS, *loop_damage.FAULTS)},
    **{fault.name: "finite values that memory changed" for fault in altered.FAULTS},
}


def split_catalog() -> tuple[list[Fault], list[Fault]]:
    """Split the faults into the first of each cause and action, for each group of `_APART`, and the others."""
    first_faults: dict[tuple[str, str, str], Fault] = {}
    other_faults = []
    for fault in catalog(targets_for(DEFAULT)):
        key = (_APART.get(fault.name, ""), fault.expected.cause, fault.expected.action)
        if first_faults.setdefault(key, fault) is not fault:
            other_faults.append(fault)
    return list(first_faults.values()), other_faults


def judge_part(faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch) -> None:
    """Require that every fault is named and recovered, and that no file is poisoned."""
    monkeypatch.setattr(phases, "subprocess", SimpleNamespace(run=forked))
    AcceleratorState._reset_state(reset_partial_state=True)
    results = list(judge_all(faults, targets_for(DEFAULT)))
    failed = {result.name: result.why for result in results if not result.passed}
    assert not failed
    assert len(results) == len(faults)
    assert totals(results)["poisoned_files"] == 0
