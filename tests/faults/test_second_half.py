"""Every second fault of the catalog; the others are in test_suite.py."""

import pytest
from fault_parts import judge_part


@pytest.mark.slow
@pytest.mark.thorough
def test_the_other_faults_are_named_and_recovered_and_no_file_is_poisoned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge_part(1, monkeypatch)
