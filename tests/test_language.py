"""No package is written less plainly than its ceilings in tests/language_ceilings.json allow."""

import json
from pathlib import Path

import pytest
from language import CEILINGS, failures, measure, packages

PACKAGES = packages()
LIMITS: dict[str, dict[str, float]] = json.loads(CEILINGS.read_text(encoding="utf-8"))


def test_every_package_has_ceilings() -> None:
    assert len(PACKAGES) > 15
    assert PACKAGES.keys() == LIMITS.keys(), "run: python -m tests.language --write"


@pytest.mark.parametrize("package", LIMITS)
def test_no_figure_is_worse_than_its_ceiling(package: str) -> None:
    problems = list(failures(package, measure(PACKAGES[package]), LIMITS[package]))
    assert not problems, "\n".join(problems)


PLANTED = '''
"""A module docstring is not counted."""
# One comment.
TEXT = "# not a comment" + 'nor "# this"' + """nor
# this"""


def given(one: int, other: int) -> int:
    """Return what is given."""
    return _helper(one) + other


def _helper(one: int) -> int:
    return one  # a second comment


def plain(values: list[int]) -> int:
    """Add the values, in the order of the list, in words."""
    total = 0
    for value in values:
        total += _shared(value) + _shared(1)
    where = total
    return where


def _shared(value: int) -> int:
    return value
'''


def test_figures_are_counted_as_documented(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(f"{PLANTED}#{'-' * 119}\n")
    measurement = measure([file])
    (places,) = measurement.worst_places("docstrings_mannered_percent")
    assert places.endswith("line 8 `given: what is`, line 17 `plain: in words`")
    assert measurement.figures() == {
        # Arguments one, other, one of 10 names that are bound; `where` is a word of the field.
        "grammar_names_per_1000": 300.0,
        "grammar_functions_per_1000": 250.0,
        "named_one": 2,
        "docstrings_return_percent": 50.0,
        "docstrings_mannered_percent": 100.0,
        "comment_percent": 10.7,
        "one_caller_helpers_percent": 25.0,
        "lines_over_119": 1,
    }


def test_a_worse_figure_is_reported_with_its_three_worst_places(tmp_path: Path) -> None:
    files = []
    for number in range(1, 5):
        file = tmp_path / f"file_{number}.py"
        file.write_text("one = 0\n" * number)
        files.append(file)
    measurement = measure(files)
    limits = measurement.figures()
    assert list(failures("package", measurement, limits)) == []
    (message,) = failures("package", measurement, {**limits, "named_one": 9})
    assert message.splitlines() == [
        "package: named_one is 10, worse than its ceiling of 9",
        f"  {files[3]}: 4, line 1 `one`, line 2 `one`, line 3 `one`",
        f"  {files[2]}: 3, line 1 `one`, line 2 `one`, line 3 `one`",
        f"  {files[1]}: 2, line 1 `one`, line 2 `one`",
    ]
    (message,) = failures("package", measurement, {**limits, "comment_percent": 0.1})
    assert message.startswith("package: comment_percent is 0, worse than its floor of 0.1")
    better_limits = {name: value + 1 for name, value in limits.items()} | {"comment_percent": 0}
    assert list(failures("package", measurement, better_limits)) == []
