"""Verifies a full pipeline (`train.mode: full`): reads its transformer's files tensor by tensor."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dit_lora.environment.safetensors_files import open_safetensors
from dit_lora.errors import format_list
from dit_lora.numerics.finite import describe_bad_values
from dit_lora.verify.checks import VerificationCheck, check_finite

_NO_ADAPTER = "a whole model, without adapter"


def check_pipeline_files(
    files: Sequence[Path],
    expected: Mapping[str, torch.Tensor],
    loader_name: str,
    trained_tensors: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, VerificationCheck]:
    """The checks `keys` and `check_finite` of the files, and placeholders for `effect` and `scale`, which do not
    apply.

    Args:
        files: The transformer's files.
        expected: Tensors of a fresh model; only names and shapes are used.
        loader_name: Name of what loads the files, for messages.
        trained_tensors: Tensors that the files must contain, with these values; None to skip this.

    Raises:
        UnreadableFileError: A file cannot be read.
    """
    misfits, bad, names_read = [], [], set()
    for file in files:
        with open_safetensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                # One at a time: a second full model may not fit into host memory.
                tensor = opened.get_tensor(name)
                names_read.add(name)
                # The tensor is checked and freed before the next one is read.
                problem = _describe_mismatch(name, tensor, expected, trained_tensors)
                misfits += [problem] if problem else []
                fault = describe_bad_values(name, tensor)
                bad += [fault] if fault else []
    misfits += [f"{name}: not in the files" for name in expected if name not in names_read]
    keys = VerificationCheck(
        True, f"{loader_name} loads all {len(names_read)} tensors of the transformer; none is missing"
    )
    if misfits:
        summary = f"{loader_name} does not load the transformer as it is; use the folder as the run wrote it"
        keys = VerificationCheck(False, format_list(summary, misfits))
    return {
        "keys": keys,
        "finite": check_finite(bad, len(names_read)),
        "effect": VerificationCheck(True, _NO_ADAPTER),
        "scale": VerificationCheck(True, f"{_NO_ADAPTER}: there is no rank and no alpha"),
    }


def _describe_mismatch(
    name: str,
    tensor: torch.Tensor,
    expected: Mapping[str, torch.Tensor],
    trained_tensors: Mapping[str, torch.Tensor] | None,
) -> str | None:
    """Reason why a file's tensor does not belong into the model; None if it does."""
    if name not in expected:
        return f"{name}: not in the model"
    if tensor.shape != expected[name].shape:
        shapes = f"{list(tensor.shape)} in the file, {list(expected[name].shape)} in the model"
        return f"{name}: {shapes}"
    if trained_tensors is not None and name in trained_tensors:
        # Bitwise in the trained dtype. NaN equals NaN here: the check `check_finite` reports it.
        values = trained_tensors[name].detach().cpu()
        if not torch.allclose(tensor.to(values.dtype), values, rtol=0, atol=0, equal_nan=True):
            return f"{name}: not what was trained"
    return None
