"""Every tiny checkpoint of every family, one test each."""

from pathlib import Path

import pytest
from family_cases.case import Case
from family_cases.subject import EVERY, Subject, open_subject


@pytest.fixture(params=EVERY.values(), ids=list(EVERY))
def subject(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> Subject:
    case: Case = request.param
    return open_subject(case, tiny_checkpoints[case.variant])
