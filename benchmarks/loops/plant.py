"""Faults that the loops of this folder plant in themselves: a NaN in a sample, in a weight, in the loss, and so on.

A loop calls these functions in the few places where a fault can be put. They return what they are given, unchanged,
unless the driver names a fault in the environment variable `LOOP_FAULT`. What was planted is appended to a file of
notes, one JSON object per line, so that the driver knows which cause is the right one.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VARIABLE = "LOOP_FAULT"
INDEX = 5
"""Dataset index of the planted sample, unless the loop chooses another."""
STEP = 3
"""Gradients, states and so on are spoiled when they pass by for the third time."""
NAN = float("nan")
HUGE = 1e25
"""Finite, but its square overflows fp32: Adam's second moment becomes Inf."""

_counts: Counter[str] = Counter()
_segment_calls: Counter[int] = Counter()


@functools.lru_cache(maxsize=1)
def _parse(text: str) -> dict[str, Any]:
    return json.loads(text) if text else {}


def _config() -> dict[str, Any]:
    return _parse(os.environ.get(VARIABLE, ""))


def _note(record: Mapping[str, Any]) -> None:
    """Append a line to the driver's file of notes; only the first rank writes."""
    path = _config().get("notes")
    if path and os.environ.get("RANK", "0") == "0":
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _is_due(location: str, *faults: str, late: str | None = None) -> bool:
    """Count a place that the loop passes, and return True if the fault belongs there, now."""
    config = _config()
    if not config:
        return False
    _counts[location] += 1
    _note({"location": location})
    if config["fault"] == late:
        return _counts[location] == config["totals"][location]
    return config["fault"] in faults and _counts[location] == config.get("step", STEP)


def choose(fault: str, kind: str, **facts: Any) -> bool:
    """True if this fault is planted. For loops that compute the fault in their own arithmetic."""
    is_chosen = _config().get("fault") == fault
    if is_chosen:
        _note({"planted": kind, **facts})
    return is_chosen


def _spoil_first_float(value: Any, number: float) -> bool:
    """Set one element of the first float tensor in a sample, which may be a tensor, tuple, list or dict."""
    if isinstance(value, Tensor):
        if not (value.is_floating_point() or value.is_complex()) or not value.numel():
            return False
        _set_element(value, number)
        return True
    parts = value.values() if isinstance(value, Mapping) else value
    is_container = isinstance(value, Mapping | tuple | list)
    return is_container and any(_spoil_first_float(part, number) for part in parts)


def spoil_item(item: Any, index: int, target: int = INDEX) -> Any:
    """Put a NaN into one sample as a dataset's `__getitem__` returns it."""
    if index == target and _config().get("fault") == "nan_sample":
        item = _clone(item)
        _spoil_first_float(item, NAN)
        _note({"planted": "sample", "index": index})
    return item


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _clone(part) for key, part in value.items()}
    return type(value)(_clone(part) for part in value) if isinstance(value, tuple | list) else value


def spoil_samples(samples: Any, index: int = INDEX) -> Any:
    """Put a NaN into one row of a dataset: a tensor of samples, or a list of them."""
    if _config().get("fault") == "nan_sample":
        _spoil_first_float(samples[index], NAN)
        _note({"planted": "sample", "index": index})
    return samples


def spoil_targets(targets: Any, index: int = INDEX) -> Any:
    """Put a NaN, or a number whose square overflows, into one row of the targets."""
    fault = _config().get("fault")
    if fault in ("nan_target", "huge_target"):
        _spoil_first_float(targets[index], NAN if fault == "nan_target" else HUGE)
        _note({"planted": "target", "index": index})
    return targets


def spoil_gradient(model: nn.Module | Iterable[nn.Parameter]) -> None:
    """Make one element of one parameter's gradient Inf, after the backward.

    Also with `replay_oom`: only experiments find the cause of a bad gradient, and there is no memory for them.
    """
    if not _is_due("gradient", "inf_gradient", "replay_oom", late="late_nan"):
        return
    number = NAN if _config()["fault"] == "late_nan" else float("inf")
    for name, parameter in _named_parameters(model):
        if parameter.grad is not None:
            _set_element(parameter.grad, number)
            _note({"planted": "gradient", "name": name})
            return
    raise RuntimeError("no parameter has a gradient to plant the fault in")


def spoil_between_steps(model: nn.Module, optimizer: Any) -> None:
    """Make one element of an optimizer state, or of a trained weight, NaN; after the optimizer's step."""
    if not _is_due("step", "nan_moment", "nan_weight", late="late_weight"):
        return
    for name, parameter in _named_parameters(model):
        if not parameter.requires_grad:
            continue
        if _config()["fault"] != "nan_moment":
            # By `.data`: memory that goes bad does not count as a write of the loop.
            _set_element(parameter.data, NAN)
            _note({"planted": "weight", "name": name})
            return
        for key, state in optimizer.state.get(parameter, {}).items():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                _set_element(state.data, NAN)
                _note({"planted": "moment", "name": name, "state": key})
                return
    raise RuntimeError("no parameter or optimizer state to plant the fault in")


def spoil_loss(loss: Tensor) -> Tensor:
    """Let the loop's own arithmetic make the loss NaN: the square root of a negative number."""
    if not _is_due("loss", "nan_loss"):
        return loss
    _note({"planted": "loss"})
    return loss * (loss.detach() * 0 - 1).sqrt()


def spoil_state(name: str, state: Tensor) -> Tensor:
    """Make one element NaN of what the loop carries from step to step: hidden state, queue, teacher's weight."""
    if _is_due(f"state {name}", "nan_state"):
        _set_element(state.detach(), NAN)
        _note({"planted": "state", "name": name})
    return state


def drop_rows(*tensors: Tensor) -> Any:
    """Leave no row in one batch, as a filter does that finds nothing to keep."""
    if _is_due("rows", "empty_batch"):
        tensors = tuple(tensor[:0] for tensor in tensors)
        _note({"planted": "empty"})
    return tensors if len(tensors) > 1 else tensors[0]


def clear_mask(mask: Tensor) -> Tensor:
    """Leave no element in one batch that there is anything to learn from."""
    if _is_due("mask", "empty_batch"):
        mask = torch.zeros_like(mask)
        _note({"planted": "empty"})
    return mask


def limit_calls(model: nn.Module) -> nn.Module:
    """Let the device run out of memory in every call of the model that the loop does not make itself.

    The run without the guard notes how many calls lie between two of the loop's other `plant` calls. More calls than
    that in the same segment are somebody else's.
    """
    if _config().get("fault") == "replay_oom":
        model.register_forward_pre_hook(_count_call)
    return model


def _count_call(_module: nn.Module, _args: Any) -> None:
    segment = sum(_counts.values())
    _segment_calls[segment] += 1
    limits = _config().get("calls")
    if limits is None:
        _note({"call": segment})
    elif _segment_calls[segment] > limits.get(str(segment), 0):
        _note({"planted": "oom"})
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (planted)")


def record_bad_rows() -> None:
    """Note which rows of the models' positional inputs are not finite; for a run without the guard."""
    depth = 0

    def enter(_module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1
        if depth > 1:  # what a model gives to its parts is not what the loop gave to the model
            return
        for value in args if isinstance(args, tuple) else (args,):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                bad = ~value.detach().flatten(1 if value.dim() > 1 else 0).isfinite()
                rows = bad.any(1) if value.dim() > 1 else bad
                for row in rows.nonzero().flatten().tolist():
                    _note({"bad_row": row})

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        depth -= 1

    nn.modules.module.register_module_forward_pre_hook(enter)
    nn.modules.module.register_module_forward_hook(leave, always_call=True)


def _named_parameters(model: Any) -> list[tuple[str, nn.Parameter]]:
    """Parameters by their names in the model that DDP or torch.compile wraps."""
    if isinstance(model, nn.Module):
        return [
            (name.removeprefix("module.").replace("_orig_mod.", ""), parameter)
            for name, parameter in model.named_parameters()
        ]
    return [(str(number), parameter) for number, parameter in enumerate(model)]


def _set_element(tensor: Tensor, number: float) -> None:
    """Set one element in place, in a dense or sparse tensor, or in the local shard of a DTensor."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    values = tensor._values() if tensor.is_sparse else tensor
    with torch.no_grad():
        values[(0,) * values.dim()] = number
