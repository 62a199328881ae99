"""Pages that list the files of a walk through the code. What they name exists, and the walks stay short."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dit_lora"
CLIP_TO_LOSS = PACKAGE / "training" / "tasks" / "diffusion" / "precompute.py"
CHECKPOINT_CONTENT = PACKAGE / "training" / "checkpoint_state.py"
LOOP = PACKAGE / "training" / "loop.py"
FAMILY_PAGE = PACKAGE.parent / "docs" / "adding_a_family.md"
MAX_CLIP_FILES, MAX_CHECKPOINT_FILES, MAX_NAN_FILES, MAX_FAMILY_FILES = 18, 5, 12, 6


def read_docstring(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text()))
    assert text
    # Above it, the loop's docstring is about the step.
    return text[max(0, text.find("From a NaN loss")) :]


def list_files(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[\w/]+\.py", text)))


def find_missing(text: str) -> list[str]:
    """Files and functions that a docstring names and that do not exist; functions are looked up in its files."""
    missing, sources = [], [module.read_text() for module in (CLIP_TO_LOSS, CHECKPOINT_CONTENT, LOOP)]
    for name in list_files(text):
        paths = [path for path in PACKAGE.rglob("*.py") if path.as_posix().endswith(f"/{name}")]
        sources += [path.read_text() for path in paths]
        if not paths:
            missing.append(name)
    definitions = {name for source in sources for name in re.findall(r"(?:def|class) (\w+)", source)}
    names = [name for identifier in re.findall(r"`([\w.]+)`", text) for name in identifier.split(".")]
    return missing + [name for name in names if name not in definitions]


def test_a_missing_file_or_function_is_noticed() -> None:
    text = "`gather_training_state` of training/fit.py, `collect_nothing` of it, and training/no_such.py"
    assert find_missing(text) == ["training/no_such.py", "collect_nothing"]


@pytest.mark.parametrize("module", [CLIP_TO_LOSS, CHECKPOINT_CONTENT, LOOP], ids=lambda path: path.stem)
def test_all_that_a_walk_names_exists(module: Path) -> None:
    assert find_missing(read_docstring(module)) == []


def test_a_clip_passes_few_files_to_its_loss() -> None:
    assert 12 < len(list_files(read_docstring(CLIP_TO_LOSS))) <= MAX_CLIP_FILES


def test_a_nan_passes_few_files_to_the_quarantine() -> None:
    # The walk begins in the loop itself.
    assert 8 < len({"loop.py", *list_files(read_docstring(LOOP))}) <= MAX_NAN_FILES


def test_few_files_are_read_before_a_family_is_written() -> None:
    steps = re.findall(r"^\d\. .*$", FAMILY_PAGE.read_text().partition("\n## ")[0], flags=re.MULTILINE)
    assert 4 < len(steps) <= MAX_FAMILY_FILES
    for path in re.findall(r"`((?:families|tests)/[\w/]+\.py)`", "\n".join(steps)):
        assert (PACKAGE / path).exists() or (PACKAGE.parent / path).exists(), path


def test_each_part_of_a_checkpoint_is_changed_in_few_files() -> None:
    rows = re.findall(r"^    \w.*$", read_docstring(CHECKPOINT_CONTENT), flags=re.MULTILINE)
    assert len(rows) == 5
    for row in rows:
        # Every change begins in these two.
        files = {"training/checkpoint_state.py", "checkpoints/files.py", *list_files(row)}
        assert len(files) <= MAX_CHECKPOINT_FILES, row
