"""Every tiny checkpoint of every family, one test each."""

from pathlib import Path

import pytest
from family_cases.case import Case
from family_cases.subject import EVERY, Subject, open_subject

# Later items are overwritten by earlier ones.
_FIRST_CASES = {case.family: name for name, case in reversed(EVERY.items()) if not case.thorough}
ARCHITECTURES = {*_FIRST_CASES.values(), *(name for name, case in EVERY.items() if case.has_other_modules)}
"""A case of each network; the others of its family have the same modules in other sizes, or another task."""


def parameters(quick: set[str]) -> list[object]:
    """Every case; those that are not `quick` are for `make test-all`."""
    assert quick <= set(EVERY)
    return [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.thorough] if case.thorough or name not in quick else [],
        )
        for name, case in EVERY.items()
    ]


def opened(case: Case, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Subject:
    case.prepare(monkeypatch)
    return open_subject(case, checkpoints[case.variant])


@pytest.fixture(params=parameters(set(EVERY)))
def subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    return opened(request.param, tiny_checkpoints, monkeypatch)


@pytest.fixture(params=parameters(ARCHITECTURES))
def model_subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    """For what depends on the network alone, whatever the task and the pipeline."""
    return opened(request.param, tiny_checkpoints, monkeypatch)
