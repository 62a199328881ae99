"""Facts that a figure is worth nothing without: device, date, command, commit, versions and the GPU's clocks.

    python -m benchmarks.machine [--device cuda|cpu]     prints it as JSON

The commit is git's; without a repository, it is in the variable DIT_LORA_COMMIT or in a file COMMIT at the root.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.gpu_state import gpu_state

ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "triton", "diffusers", "transformers", "accelerate", "peft")


def facts(device: torch.device, command: list[str]) -> dict[str, str]:
    """Versions, device and command by name. The GPU's clocks are those at the time of the call."""
    machine = {
        "device": device_name(device),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(command),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }
    if device.type == "cuda":
        machine["cudnn"] = str(torch.backends.cudnn.version())
        machine |= gpu_state(device.index or 0)
    else:
        machine["threads"] = str(torch.get_num_threads())
    return machine


def in_words(machine_facts: Mapping[str, str]) -> str:
    """Format the facts as a line above a table. Device and date are left to its title."""
    parts = {name: value for name, value in machine_facts.items() if name not in ("device", "date")}
    command = parts.pop("command")
    return f"`{command}`: {', '.join(f'{name} {value}' for name, value in parts.items())}."


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def file_stem(kind: str, machine_facts: Mapping[str, str]) -> str:
    """The file name `<kind>_<device>_<date>`, with letters, digits, hyphens and underscores."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", machine_facts["device"]).strip("-").lower()
    return f"{kind}_{device}_{machine_facts['date']}"


def commit() -> str:
    """The commit of this tree; `unknown` if it cannot be determined."""
    # Of this folder's own repository alone: one that a copy of the tree happens to lie in has other commits.
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        try:
            process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            pass
        else:
            return process.stdout.strip()
    commit_name, file = os.environ.get("DIT_LORA_COMMIT"), ROOT / "COMMIT"
    return commit_name or (file.read_text().strip() if file.is_file() else "unknown")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = torch.device(parser.parse_args(argv).device)
    print(json.dumps(facts(device, sys.argv), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
