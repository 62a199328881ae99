"""A family of another package, registered by an entry point, in a process that has its folder on the path."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import ROOT, launch_environment

from dit_lora import families

PACKAGE = ROOT / "tests" / "toy_package"


def run(*args: str, code: int = 0, folders: Sequence[Path] = (PACKAGE,)) -> str:
    """Standard output and standard error of Python with these arguments and folders on its path."""
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, *args],
        env={**launch_environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


EXAMPLE = ROOT / "examples" / "aura_flow"


def write_metadata(folder: Path) -> None:
    """Write the metadata that pip writes when it installs the example, with the entry points of its pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    metadata = folder / "dit_lora_aura_flow-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


def run_example_tests(folder: Path, expression: str, *files: str) -> int:
    """Run tests of these files with the example on the path, as after its installation.

    All must pass. Returns their number.
    """
    write_metadata(folder)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not thorough", "--lazy-checkpoints"]
    folders = (folder, EXAMPLE, EXAMPLE / "tests")
    output = run("-m", "pytest", *options, "-k", expression, *(str(ROOT / file) for file in files), folders=folders)
    (num_passed,) = re.findall(r"(\d+) passed", output)
    return int(num_passed)


@pytest.mark.slow
def test_the_example_meets_the_contract_and_commands_train_it(tmp_path: Path) -> None:
    files = ("tests/dit_lora/families/test_contract.py", "examples/aura_flow/tests")
    # The contract's, one that asks for all families' cases, and the example's own two.
    assert run_example_tests(tmp_path, "aura or every_variant", *files) >= 17


@pytest.mark.thorough
@pytest.mark.slow
def test_the_example_resumes_bit_for_bit(tmp_path: Path) -> None:
    # Its smoke recipe, and a test that asks for all smoke recipes.
    assert run_example_tests(tmp_path, "aura or every_smoke", "tests/recipes/test_families.py") == 2


def test_whatever_a_package_raises_when_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "family_without_settings.py").write_text("import os\nos.environ['NO_SUCH_SETTING']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(families, "_OTHER_FAMILIES", {"lost": "family_without_settings"})
    monkeypatch.setattr(families, "FAMILIES", {**families.FAMILIES, "lost": "family_without_settings"})
    assert "lost" not in families.get_families()
    assert "warning: cannot load family lost from family_without_settings (KeyError" in capsys.readouterr().err


def test_a_broken_package_is_one_line_and_ends_nothing() -> None:
    code = (
        "from dit_lora.families import get_families, get_family; "
        "print(sorted(get_families())); get_families(); print(get_family('sd3').checkpoint_module)"
    )
    output = run("-c", code)
    assert "'toy'" in output
    assert "'broken'" not in output
    assert output.count("cannot load family broken from toy_family.missing (ModuleNotFoundError") == 1
    # A name of this package is this package's.
    assert "dit_lora.families.sd3.checkpoint" in output
    alone = run("-c", "from dit_lora.families import get_family; get_family('broken')", code=1)
    assert "DitLoraError: cannot load family broken" in alone
