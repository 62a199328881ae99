"""Checks a whole pipeline (`train.mode: full`): its transformer's files, read tensor by tensor."""

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
    """Return `keys` and `finite` of the files, and what is said in place of `effect` and `scale`.

    `expected` are the tensors of a fresh model, of which names and shapes count; `trained` what the files have to
    hold. Raises `CheckFailedError` if a file cannot be read.
    """
    misfits, bad, seen = [], [], set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    # One at a time: a whole model may not fit into host memory beside the run's own.
                    tensor = opened.get_tensor(name)
                    seen.add(name)
                    problem = _misfit(name, tensor, expected, trained)
                    misfits += [problem] if problem else []
                    fault = describe_bad(name, tensor)
                    bad += [fault] if fault else []
        except (OSError, SafetensorError) as error:
            raise unreadable(file, error) from error
    misfits += [f"{name}: not in the files" for name in expected if name not in seen]
    keys = Check(True, f"{loader} takes all {len(seen)} tensors of the transformer; none lacks")
    if misfits:
        summary = (
            f"{loader} does not load the transformer as it is; use the folder as the run wrote it"
        )
        keys = Check(False, listed(summary, misfits))
    return {
        "keys": keys,
        "finite": finite(bad, len(seen)),
        "effect": Check(True, f"{_WHOLE}: there is no update beside it"),
        "scale": Check(True, f"{_WHOLE}: there is no rank and no alpha"),
    }


def _misfit(
    name: str,
    tensor: torch.Tensor,
    expected: Mapping[str, torch.Tensor],
    trained: Mapping[str, torch.Tensor] | None,
) -> str | None:
    if name not in expected:
        return f"{name}: nothing of the model takes it"
    if tensor.shape != expected[name].shape:
        shapes = f"{list(tensor.shape)} in the file, {list(expected[name].shape)} in the model"
        return f"{name}: {shapes}"
    if trained is not None and name in trained:
        values = trained[name].detach().cpu()
        if not torch.allclose(tensor.to(values.dtype), values, rtol=0, atol=0, equal_nan=True):
            return f"{name}: not what was trained"
    return None
