"""Kernels that go wrong at a step of a run: their references on a CPU, changed as a bug would change them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fuse_checks import by
from topologies import Case, Seen, run_all

from dit_lora.fuse import api
from dit_lora.training import fit as running
from dit_lora.training.run import Run
from dit_lora.training.step import StepResult
from dit_lora_kernels import ada_norm, qk_norm_rope

Op = Callable[..., Any]
OPS = {
    "ada_norm": (ada_norm, "ada_norm_reference", "_backward_reference"),
    "qk_norm_rope": (qk_norm_rope, "qk_norm_rope_reference", "_compute_reference_gradients"),
}


class Armed:
    """Whether the run has come to the step from which on the kernel is wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        self.yes = step == 0
        note = running._log_step

        def noted(run: Run, bar: Any, result: StepResult) -> None:
            self.yes = self.yes or result.step >= step
            note(run, bar, result)

        monkeypatch.setattr(running, "_log_step", noted)


def _first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return change(result)
    first_output = result[0] if result[0] is None else change(result[0])
    return (first_output, *result[1:])


def _values(op: Op) -> Op:
    return lambda *args, **kwargs: _first(op(*args, **kwargs), lambda x: x * 1.001)


def _rows(op: Op) -> Op:
    """Every sample gets the first one's tables; of an op without tables, the first one's output."""

    def wrong(stream: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(stream, torch.Tensor):
            return _first(op(stream, *args, **kwargs), lambda x: x[:1].expand_as(x).clone())
        tables = {"shift": stream.shift[:1].expand_as(stream.shift)}
        return op(stream._replace(**tables), *args, **kwargs)

    return wrong


def _last_block(op: Op) -> Op:
    """The last partial block of tokens gets no gradient."""

    def dropped(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, -(x.shape[1] % 16 or 16) :] = 0
        return x

    return lambda *args, **kwargs: _first(op(*args, **kwargs), dropped)


def _stale(every: int) -> Callable[[Op], Op]:
    """Each so manyth call gives a part of what the call before left in memory."""

    def stale(op: Op) -> Op:
        calls, memory = [0], {}

        def wrong(*args: Any, **kwargs: Any) -> Any:
            def reused(x: torch.Tensor) -> torch.Tensor:
                calls[0] += 1
                before = memory.get(x.shape)
                memory[x.shape] = x.clone()
                if before is None or calls[0] % every:
                    return x
                return torch.cat([x[..., : x.shape[-1] // 2], before[..., x.shape[-1] // 2 :]], -1)

            return _first(op(*args, **kwargs), reused)

        return wrong

    return stale


FAULTS: dict[str, tuple[bool, Callable[[Op], Op]]] = {
    "values 0.1 % off": (False, _values),
    "wrong rows": (False, _rows),
    "wrong backward": (
        True,
        lambda op: lambda *a, **k: _first(op(*a, **k), lambda x: x * 0.99),
    ),
    "the last partial block dropped in backward": (True, _last_block),
    "stale memory in 2 % of calls": (False, _stale(50)),
    "stale memory in 50 % of calls": (False, _stale(2)),
}
"""Each with whether it is in the backward."""


def plant(monkeypatch: pytest.MonkeyPatch, op: str, fault: str, step: int) -> None:
    """Let this kernel be wrong after that step of the next run."""
    module, forward, backward = OPS[op]
    in_backward, change = FAULTS[fault]
    name = backward if in_backward else forward
    right, armed = getattr(module, name), Armed(monkeypatch, step)
    changed = change(right)

    def planted(*args: Any, **kwargs: Any) -> Any:
        return (changed if armed.yes else right)(*args, **kwargs)

    monkeypatch.setattr(module, name, planted)


@contextmanager
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within it `auto` takes every kernel, by its reference."""
    with by("reference", monkeypatch), monkeypatch.context() as patch:
        patch.setattr(api, "_find_off_reason", lambda *_: None)
        yield


def run_planted(cases: list[tuple[Case, str, int]]) -> list[Seen]:
    """On one of several ranks: each case with ada_norm wrong in a way, after a step."""
    results = []
    for case, fault, step in cases:
        with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
            plant(patch, "ada_norm", fault, step)
            results += run_all([case])
    return results
