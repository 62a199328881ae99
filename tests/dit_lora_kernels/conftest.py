"""Every kernel compiled for sm_90, in a process where Triton does not interpret."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dit_lora_kernels
from dit_lora_kernels import ada_norm, ada_norm_kernels

SCRIPT = Path(__file__).parents[2] / "kernels" / "bench" / "sm90.py"


@pytest.fixture(scope="session")
def sm90() -> Callable[[str], list[dict[str, Any]]]:
    """`sm90("ada_norm")`: what ptxas made of the op's cases in kernels/bench/sm90_cases.py."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU kernels are timed, and this takes its minutes")

    def compiled(op: str) -> list[dict[str, Any]]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.path.dirname(dit_lora_kernels.__path__[0])
        result = subprocess.run(
            [sys.executable, str(SCRIPT), "--json", "--op", op],
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert result.returncode == 0, result.stderr
        return [json.loads(line) for line in result.stdout.splitlines()]

    return compiled


@pytest.fixture
def several_rows_a_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a program of `ada_norm`'s backward take several rows; so few as tests have would have a program each."""
    monkeypatch.setattr(ada_norm_kernels, "MIN_PROGRAMS", 1)
    ada_norm._build_backward_plan.cache_clear()
    yield
    ada_norm._build_backward_plan.cache_clear()
