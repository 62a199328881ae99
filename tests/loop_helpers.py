"""What tests of the guard in a loop that is not ours share."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

Events = list[dict[str, Any]]


def fresh_accelerator(**how: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **how)


def batch(number: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))


def bad_batch(number: int) -> torch.Tensor:
    x = batch(number)
    x[1, 2] = torch.nan
    return x


def everything(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> list[torch.Tensor]:
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values() if torch.is_tensor(value)]
    return [t.detach().clone() for t in [*(p for m in models for p in m.parameters()), *moments]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def causes(events: Events) -> list[tuple[str, str]]:
    return [(event["verdict"]["cause"], event["action"]) for event in events]


def spoil_once(parameter: nn.Parameter, value: float) -> None:
    """One element of the next gradient."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        handle.remove()
        gradient = gradient.clone()
        gradient.view(-1)[1] = value
        return gradient

    handle = parameter.register_hook(hook)
