"""Asks nvidia-smi for the state of a GPU that figures depend on: clocks, power and temperature."""

import subprocess

_FIELDS = {
    "driver": "driver_version",
    "clock": "clocks.sm",
    "highest clock": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power": "power.draw",
    "power limit": "power.limit",
    "temperature": "temperature.gpu",
}


def gpu_state(index: int = 0) -> dict[str, str]:
    """Driver, clocks, power and temperature of one GPU, with units; empty if nvidia-smi gives no answer."""
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    command = ["nvidia-smi", f"--id={index}", query, "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in process.stdout.strip().split(",")]
    return dict(zip(_FIELDS, values, strict=True)) if len(values) == len(_FIELDS) else {}
