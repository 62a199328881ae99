"""bitsandbytes' CPU build is imported without the Hub's kernel, and without a word about it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OPS = """
import logging
try:
    from kernels import get_kernel
    get_kernel("kernels-community/quantization-bitsandbytes", version=1)
except Exception as error:
    logging.getLogger(__name__).warning("Failed to load CPU gemm_4bit_forward: %s", error)
"""
PROGRAM = """
import sys
{first}
import bitsandbytes.backends.cpu.ops
assert not hasattr(sys.modules.get("kernels"), "asked")
import kernels  # it can be imported by others
assert kernels.get_kernel
print("whole")
"""


def run_with(tmp_path: Path, first: str) -> subprocess.CompletedProcess[str]:
    """A bitsandbytes and a kernels of ours, so that it does not depend on what this CPU can do."""
    ops = tmp_path / "bitsandbytes" / "backends" / "cpu" / "ops.py"
    ops.parent.mkdir(parents=True, exist_ok=True)
    ops.write_text(OPS)
    for folder in (ops.parent, *ops.parent.parents[:2]):
        (folder / "__init__.py").touch()
    source = "def get_kernel(*_, **__):\n    global asked\n    asked = True\n    raise OSError\n"
    (tmp_path / "kernels.py").write_text(source)
    program = [sys.executable, "-c", PROGRAM.format(first=first)]
    path = f"{tmp_path}:{ROOT}"
    return subprocess.run(program, cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)


def test_nothing_is_asked_of_the_hub_and_nothing_is_said(tmp_path: Path) -> None:
    for prelude in (
        "import dit_lora.families",
        "import dit_lora.cli.app",
        "import kernels, dit_lora.families",
    ):
        result = run_with(tmp_path, prelude)
        assert (result.returncode, result.stdout, result.stderr) == (0, "whole\n", "")
    plain_result = run_with(tmp_path, "")
    assert plain_result.returncode
    assert "Failed to load CPU gemm_4bit_forward" in plain_result.stderr
