"""Runs of recipes/lora.py over several ranks, many in one launch: the process group stays between them.

A `Case` is one run. Faults are put into one rank alone, between two steps.
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from family_cases.case import as_it_is
from launching import SCRIPT
from quick_runs import quick_runs

from dit_lora.errors import DitLoraError
from dit_lora.numerics.dtensors import get_local_tensor
from dit_lora.training import fit as running
from dit_lora.training.run import Run
from dit_lora.training.step import StepResult

Engine = Literal["ddp", "fsdp2", "zero2"]
ENGINES_HERE: list[Engine] = [
    engine for engine in get_args(Engine) if engine != "zero2" or importlib.util.find_spec("deepspeed") is not None
]
ENVIRONMENT: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp2": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    "zero2": {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
}
"""What `accelerate launch` gives the ranks."""


@dataclass(frozen=True)
class Fault:
    """One value of what one rank holds, changed after the healthy step `after`, once: by default to NaN."""

    where: Literal["frozen", "moment", "weight"]
    after: int
    rank: int
    adds: float = math.nan
    kept: bool = False
    """Whether that is before the state of the step is kept."""


@dataclass(frozen=True)
class Case:
    """One run: an engine, a recipe's overrides, and a fault."""

    engine: Engine
    args: tuple[str, ...]
    fault: Fault | None = None
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[pytest.MonkeyPatch], None] = as_it_is
    """Makes it cheap, on every rank."""

    @property
    def folder(self) -> Path:
        """run.dir, which comes last."""
        return Path(self.args[-1].removeprefix("run.dir="))


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a run."""

    exit_code: int
    error: str
    trained: int
    sharded: int
    """Of the trained tensors, how many this rank holds a part of."""
    own: dict[str, torch.Tensor]
    """This rank's trained weights and optimizer state at the end."""


def run_all(cases: list[Case]) -> list[Seen]:
    """Run the cases one after another on this rank."""
    torch.set_num_threads(1)
    PartialState(cpu=True)  # before a recipe is refused: all ranks tell that
    main = _script_main()
    with _one_group(), quick_runs():
        return [_run(case, main) for case in cases]


def _run(case: Case, main: Callable[[list[str]], None]) -> Seen:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    variables = {**ENVIRONMENT[case.engine], **case.env}
    os.environ.update(variables)
    runs: list[Run] = []
    code, error = 0, ""
    with _kept_run(runs), _fault(case.fault), pytest.MonkeyPatch.context() as patches:
        case.prepare(patches)
        try:
            main(list(case.args))
        except DitLoraError as problem:
            code, error = problem.exit_code, str(problem)
    for name in variables:
        os.environ.pop(name, None)
    if not runs:
        return Seen(code, error, 0, 0, {})
    engine = runs[0].engine
    state = engine.local_state_dict()
    full_state = engine.trainable_state_dict()
    parts = [name for name in full_state if get_local_tensor(state[name]).numel() < full_state[name].numel()]
    local_state = {name: get_local_tensor(tensor.detach()).clone() for name, tensor in state.items()}
    return Seen(code, error, len(full_state), len(parts), local_state)


@contextlib.contextmanager
def _one_group() -> Iterator[None]:
    """The process group outlives a run, which would end it."""
    destroy = AcceleratorState.destroy_process_group
    AcceleratorState.destroy_process_group = lambda self, group=None: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        AcceleratorState.destroy_process_group = destroy  # type: ignore[method-assign]


@contextlib.contextmanager
def _kept_run(kept: list[Run]) -> Iterator[None]:
    """`kept` gets the run that the recipe's script makes."""
    fit = _script().fit

    def noted(run: Run, **hooks: Any) -> None:
        kept.append(run)
        fit(run, **hooks)

    # The script has the function under its own name.
    module = _script()
    module.fit = noted
    try:
        yield
    finally:
        module.fit = fit


@contextlib.contextmanager
def _fault(fault: Fault | None) -> Iterator[None]:
    """The loop's work after a step, and then the fault."""
    if fault is None:
        yield
        return
    after, pending = running._check_and_save, [True]

    def then(run: Run, result: StepResult) -> None:
        is_now = result.step == fault.after and bool(pending)
        is_own = run.accelerator.process_index == fault.rank
        if is_now:
            pending.clear()
        if is_now and is_own and fault.kept:
            _spoil(run, fault)
        after(run, result)
        if is_now and is_own and not fault.kept:
            _spoil(run, fault)

    running._check_and_save = then
    try:
        yield
    finally:
        running._check_and_save = after


def _spoil(run: Run, fault: Fault) -> None:
    """The middle of this rank's part of the first tensor of a kind that has values here."""
    tensors = {
        "frozen": (p for p in run.transformer.parameters() if not p.requires_grad),
        "weight": (p for p in run.transformer.parameters() if p.requires_grad),
        "moment": (t for n, t in run.engine.local_optimizer_state().items() if n.endswith("exp_avg")),
    }
    values = next(
        tensor for tensor in (get_local_tensor(t.detach()) for t in tensors[fault.where]) if tensor.numel() > 1
    )
    values.view(-1)[values.numel() // 2] += fault.adds


_LOADED: list[Any] = []


def _script() -> Any:
    if not _LOADED:
        spec = importlib.util.spec_from_file_location("lora_recipe", SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        _LOADED.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(_LOADED[0])
    return _LOADED[0]


def _script_main() -> Callable[[list[str]], None]:
    main: Callable[[list[str]], None] = _script().main
    return main
