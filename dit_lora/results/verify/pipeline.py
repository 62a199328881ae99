"""Verifies a full pipeline (`train.mode: full`): reads its transformer's files tensor by tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dit_lora.errors import listed
from dit_lora.numerics.finite import describe_bad
from dit_lora.results.tensor_file import unreadable
from dit_lora.results.verify.checks import Check, finite

_WHOLE = "a whole model, without adapter"


def pipeline_checks(
    files: Sequence[Path],
    expected: Mapping[str, torch.Tensor],
    loader: str,
    trained: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Check]:
    """The checks `keys` and `finite` of the files, and placeholders for `effect` and `scale`, which do not apply.

    Args:
        files: The transformer's files.
        expected: Tensors of a fresh model; only names and shapes are used.
        loader: Name of what loads the files, for messages.
        trained: Tensors that the files must contain, with these values; None to skip this.

    Raises:
        CheckFailedError: A file cannot be read.
    """
    misfits, bad, names_read = [], [], set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    # One at a time: a second full model may not fit into host memory.
                    tensor = opened.get_tensor(name)
                    names_read.add(name)
                    # The tensor is checked and freed before the next one is read.
                    problem = _misfit(name, tensor, expected, trained)
                    misfits += [problem] if problem else []
                    fault = describe_bad(name, tensor)
                    bad += [fault] if fault else []
        except (OSError, SafetensorError) as error:
            raise unreadable(file, error) from error
    misfits += [f"{name}: not in the files" for name in expected if name not in names_read]
    keys = Check(
        True, f"{loader} takes all {len(names_read)} tensors of the transformer; none lacks"
    )
    if misfits:
        summary = (
            f"{loader} does not load the transformer as it is; use the folder as the run wrote it"
        )
        keys = Check(False, listed(summary, misfits))
    return {
        "keys": keys,
        "finite": finite(bad, len(names_read)),
        "effect": Check(True, f"{_WHOLE}: there is no update beside it"),
        "scale": Check(True, f"{_WHOLE}: there is no rank and no alpha"),
    }


def _misfit(
    name: str,
    tensor: torch.Tensor,
    expected: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor] | None,
) -> str | None:
    """Why this tensor does not belong into the model; None if it does."""
    if name not in expected:
        return f"{name}: nothing of the model takes it"
    if tensor.shape != expected[name].shape:
        shapes = f"{list(tensor.shape)} in the file, {list(expected[name].shape)} in the model"
        return f"{name}: {shapes}"
    if trained is not None and name in trained:
        # Bitwise in the trained dtype. NaN equals NaN here: the check `finite` reports it.
        values = trained[name].detach().cpu()
        if not torch.allclose(tensor.to(values.dtype), values, rtol=0, atol=0, equal_nan=True):
            return f"{name}: not what was trained"
    return None
