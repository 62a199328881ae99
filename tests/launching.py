"""Command lines and environments for recipes that run in processes of their own."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "recipes" / "lora.py"


def launch_command(args: list[str], ranks: int = 1) -> list[str]:
    if ranks == 1:
        config = str(ROOT / "accelerate_configs" / "cpu.yaml")
        head = ["accelerate.commands.launch", "--quiet", "--config_file", config]
    else:
        head = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, "-m", *head, str(SCRIPT), *args]


def launch_environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}  # as users run it
    return {**own, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
