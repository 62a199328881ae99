"""Reads the eval losses of a run from its log files. Nothing here needs torch, so that reports start quickly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from dit_lora.config.validation import LossName
from dit_lora.files import read_json_lines

EVAL_LOSS_FILES = ("held_out.jsonl", "eval_loss.jsonl")
"""Files with a run's eval losses. A run that an earlier version began has the first, whose key is `held_out_loss`; it
is read until version 0.3. Lines are written to the second only.
"""


def read_eval_losses(run_dir: Path, name: LossName = "eval_loss") -> dict[int, float]:
    """The losses of this name at fixed noise of a run so far, by step."""
    lines = (line for file in EVAL_LOSS_FILES for line in read_json_lines(run_dir / file).objects)
    losses = {line["step"]: get_eval_losses(line).get(name) for line in lines if isinstance(line.get("step"), int)}
    return {step: loss for step, loss in losses.items() if loss is not None}


def get_eval_losses(line: Mapping[str, Any]) -> dict[str, Any]:
    """The losses at fixed noise in a log line, by name. Earlier versions called `eval_loss` `held_out_loss`."""
    losses = {name: line.get(name) for name in get_args(LossName)}
    losses["eval_loss"] = line.get("eval_loss", line.get("held_out_loss"))
    return {name: loss for name, loss in losses.items() if loss is not None}
