"""Break a kernel in every way of its list and see that its tests fail: `run_mutants.py OP [NUMBER...]`.

The sources are copied, each mutant is applied only to the copy, and the op's tests run against it. Exit code 1
if any survives. Not part of the test command: a mutant takes as long as the tests up to their first failure.
"""

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def survives(op: str, old: str, new: str) -> bool:
    """Whether the op's tests pass with `old` replaced by `new` in the op's files, or in support.py."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder) / "kernels"
        shutil.copytree(ROOT / "kernels", kernels)
        folder_of = kernels / "dit_lora_kernels"
        candidates = [*sorted(folder_of.glob(f"{op}*.py")), folder_of / "support.py"]
        files = [path for path in candidates if old in path.read_text()]
        assert len(files) == 1, f"{old!r} is in {len(files)} files"
        source = files[0].read_text()
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        files[0].write_text(source.replace(old, new))
        tests = sorted((ROOT / "tests" / "dit_lora_kernels").glob(f"test_{op}*.py"))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [
            "-o",
            f"pythonpath={ROOT / 'tests'}",
            *map(str, tests),
        ]  # our kernels come from PYTHONPATH
        environment = {**os.environ, "PYTHONPATH": str(kernels)}
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        # Killed by a signal: it read or wrote where nothing is.
        assert result.returncode in (0, 1) or result.returncode < 0, result.stdout + result.stderr
        return result.returncode == 0


def main(op: str, numbers: list[int]) -> int:
    mutants = runpy.run_path(str(Path(__file__).parent / "mutants" / f"{op}.py"))["MUTANTS"]
    alive = 0
    for number, (description, old, new) in enumerate(mutants):
        if numbers and number not in numbers:
            continue
        alive += (lives := survives(op, old, new))
        print(f"{number:3} {'SURVIVES' if lives else 'caught  '} {description}", flush=True)  # noqa: T201
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], [int(n) for n in sys.argv[2:]]))
