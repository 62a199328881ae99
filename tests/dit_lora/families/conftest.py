"""Every tiny checkpoint of every family, one test each."""

from pathlib import Path

import pytest
from family_cases.case import Case
from family_cases.subject import EVERY, Subject, open_subject

PARAMETERS = [
    pytest.param(case, id=name, marks=[pytest.mark.thorough] if case.thorough else [])
    for name, case in EVERY.items()
]


@pytest.fixture(params=PARAMETERS)
def subject(
    request: pytest.FixtureRequest,
    tiny_checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Subject:
    case: Case = request.param
    case.prepare(monkeypatch)
    return open_subject(case, tiny_checkpoints[case.variant])
