"""Makes tiny runs quick by what does not change them: memory is counted once, kernels repeat themselves less often."""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from dit_lora.training import choose_checkpointing as choosing
from dit_lora.training.recovery import kernel_parity

PASSES = 4
"""Passes through blocks that ask whether a kernel repeats itself: in a tiny model all of them are two blocks', and
take a fifth of a run. Tests of kernels that are wrong only sometimes set the library's `MIN_PASSES` here."""


_counts_folder: Path | None = None
"""Where counts of memory are kept, for this process and those that it forks."""


def get_counts_folder() -> Path:
    """The folder of counts, which is made when it is first asked for; xdist's workers have one together."""
    global _counts_folder
    if _counts_folder is None and "TEST_COUNTS_FOLDER" in os.environ:
        _counts_folder = Path(os.environ["TEST_COUNTS_FOLDER"])
        _counts_folder.mkdir(exist_ok=True)
    if _counts_folder is None:
        _counts_folder = Path(tempfile.mkdtemp(prefix="counts_"))
        atexit.register(shutil.rmtree, _counts_folder, ignore_errors=True)
    return _counts_folder


def share_counts(folder: Path) -> None:
    """Count memory once for this process and all others that were given the folder, until this process ends."""
    global _counts_folder
    _counts_folder = folder
    choosing.measure_activations = _measure_once


@contextmanager
def quick_runs() -> Iterator[None]:
    """Recipes that run in this process are quick within."""
    with (
        mock.patch.object(choosing, "measure_activations", _measure_once),
        mock.patch.object(kernel_parity, "MIN_PASSES", PASSES),
    ):
        yield


_MEASURE: Callable[..., Any] = choosing.measure_activations


def _measure_once(
    model: nn.Module,
    losses: Any,
    batch: dict[str, Any],
    device: Any,
    integer_inputs: dict[str, Any] | None = None,
    forward_context: Any = None,
) -> Any:
    """`measure_activations`, which takes a third of a tiny run, but run once for equal weights and batches."""
    named_tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named_tensors]
    values = [(name, tensor.flatten().tolist()) for name, tensor in (integer_inputs or {}).items()]
    key = str((type(model), model.training, weights, batch, device, values))
    path = get_counts_folder() / hashlib.sha256(key.encode()).hexdigest()
    if path.exists():
        return json.loads(path.read_text())
    needs = _MEASURE(model, losses, batch, device, integer_inputs, forward_context)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(needs))
    temporary.rename(path)  # another rank may read it
    return needs
