"""Reads the eval losses of a run from its log files. Nothing here needs torch, so that reports start quickly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dit_lora.files import read_json_lines

EVAL_LOSS_FILES = ("held_out.jsonl", "eval_loss.jsonl")
"""Files with a run's eval losses. A run that an earlier version began has the first, whose key is `held_out_loss`; it
is read until version 0.3. Lines are written to the second only.
"""


def read_eval_losses(run_dir: Path) -> dict[int, float]:
    """Eval losses of a run so far, by step."""
    lines = (line for name in EVAL_LOSS_FILES for line in read_json_lines(run_dir / name).objects)
    return {line["step"]: get_eval_loss(line) for line in lines if isinstance(line.get("step"), int)}


def get_eval_loss(line: Mapping[str, Any]) -> Any:
    """The eval loss in a log line; None if it has none. Earlier versions called it `held_out_loss`."""
    return line.get("eval_loss", line.get("held_out_loss"))
