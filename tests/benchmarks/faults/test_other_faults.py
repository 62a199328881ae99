"""The faults of the catalog that test_suite.py leaves to `make test-all`."""

import pytest
from fault_parts import judge_part, split_catalog


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("part", range(2))
def test_the_other_faults_are_named_and_recovered_and_no_file_is_poisoned(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge_part(split_catalog()[1][part::2], monkeypatch)
