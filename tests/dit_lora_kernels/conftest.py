"""A case of every kernel compiled for sm_90, in a process where Triton does not interpret."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dit_lora_kernels

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def sm90() -> Callable[[str], list[dict[str, Any]]]:
    """`sm90("ada_norm")`: what ptxas made of the cases in sm90/ada_norm.py."""

    def compiled(op: str) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        kernels = os.path.dirname(dit_lora_kernels.__path__[0])
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), kernels])
        done = subprocess.run(
            [sys.executable, str(HERE / "sm90_compile.py"), str(HERE / "sm90" / f"{op}.py")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return compiled
