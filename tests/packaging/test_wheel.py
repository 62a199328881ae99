"""The wheel holds the two packages whole, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from launching import ROOT, launch_environment

pytestmark = pytest.mark.slow

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("dit_lora", "dit_lora_kernels"):
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.argv[1]), package.__file__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
        print(module.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_two_packages_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"dit_lora", "dit_lora_kernels"}
    assert {"dit_lora/py.typed", "dit_lora/report/page.html"} <= set(names)
    sources = {
        path.relative_to(root).as_posix()
        for root in (ROOT, ROOT / "kernels")
        for path in root.glob("dit_lora*/**/*.py")
    }
    assert sources == {name for name in names if name.endswith(".py")}


def test_every_module_imports_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In a folder of its own, without the checkout on the path."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = f"import sys; sys.path.insert(0, sys.argv[1])\n{IMPORT_ALL}"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(site)],
        cwd=tmp_path,
        env=launch_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 25
