"""One case measured: each column's values against fp64, then memory and launches, then times in turn."""

import dataclasses
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import timing
import torch
from cases import Call, Case
from stock import Outputs
from timing import REPETITIONS, Clock, Times
from torch import Tensor

from dit_lora_kernels.support import triton

STOCK, AUTOCAST, COMPILED, LIBRARY, OURS = "eager", "autocast", "compiled", "library", "ours"
COLUMNS = (STOCK, AUTOCAST, COMPILED, LIBRARY, OURS)
PASSES = ("forward", "forward+backward")
_TRITON = (triton.TritonError,) if hasattr(triton, "TritonError") else ()
FAILURES: tuple[type[Exception], ...] = (
    RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError, ImportError, OSError, *_TRITON
)  # fmt: skip
"""What torch, its compiler and Triton raise, out of memory among them."""


@dataclass
class Cell:
    """One column of one row; None where there is no such figure on this device."""

    times: Times | None = None
    error: float | None = None
    peak_bytes: int | None = None
    launches: int | None = None
    failed: str | None = None


@dataclass
class Row:
    """One op, shape and pass, with a cell for each column."""

    op: str
    shape: str
    passed: str
    bytes: int
    formula: str
    cells: dict[str, Cell] = field(default_factory=dict)
    library: str | None = None
    base_ms: float = 0.0
    floor_ms: float | None = None

    @property
    def percent_of_floor(self) -> float | None:
        """The floor over our time: 100 is as fast as the copy, and the products, of the same run."""
        cell = self.cells.get(OURS)
        if cell is None or cell.times is None or self.floor_ms is None:
            return None
        return 100 * self.floor_ms / cell.times.p50

    def failures(self) -> list[str]:
        """Return a line for each column that failed."""
        named = ((name, cell.failed) for name, cell in self.cells.items())
        return [f"{self.op} {self.shape} {self.passed} {n}: {why}" for n, why in named if why]

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON takes it; `passed` has the name that is no keyword there."""
        plain = dataclasses.asdict(self) | {"percent_of_floor": self.percent_of_floor}
        plain["cells"] = {
            name: dataclasses.asdict(cell) | {"times": cell.times and cell.times._asdict()}
            for name, cell in self.cells.items()
        }
        return plain | {"pass": plain.pop("passed")}


class _Bound:
    """A column's function with operands of its own."""

    def __init__(self, case: Case, column: str) -> None:
        self.function, self.context = _function(case, column)
        self.given = {name: _operand(case, column, name) for name in case.given}
        self.trained = [self.given[name].requires_grad_() for name in case.trained]
        self._grads: list[Tensor] | None = None

    def forward(self) -> Outputs:
        """Run the forward pass in the column's context."""
        with self.context():
            return self.function(self.given)

    def both(self) -> tuple[Tensor, ...]:
        """Run both passes and return the gradients of what trains; the outputs' gradients are made once."""
        outs = self.forward()
        if self._grads is None:
            grads = []
            for index, out in enumerate(outs):
                # The same values for each column. Drawn in fp32 and rounded to bf16 first, so that outputs of other
                # dtypes get these values too.
                generator = torch.Generator(out.device).manual_seed(index + 1)
                values = torch.randn(out.shape, generator=generator, device=out.device).to(torch.bfloat16)
                grads.append(torch.empty_like(out, requires_grad=False).copy_(values))
            self._grads = grads
        return torch.autograd.grad(outs, self.trained, self._grads)

    def call(self, passed: str) -> Callable[[], tuple[Tensor, ...]]:
        """Return what runs this pass."""
        return self.forward if passed == PASSES[0] else self.both


def _function(case: Case, column: str) -> tuple[Call, Callable[[], AbstractContextManager[Any]]]:
    """Return the column's function and the context that it runs in."""
    device = next(iter(case.given.values())).device.type
    if column == OURS:
        return case.ours, nullcontext
    if column == LIBRARY:
        assert case.library is not None
        return case.library[1], nullcontext
    if column == COMPILED:
        torch._dynamo.reset()  # one case's graphs must not count against the next one's limit
        backend = "inductor" if device == "cuda" else "aot_eager"
        return torch.compile(case.stock, dynamic=False, backend=backend), nullcontext
    autocast = partial(torch.autocast, device, dtype=torch.bfloat16)
    return case.stock, autocast if column == AUTOCAST else nullcontext


def _operand(case: Case, column: str, name: str) -> Tensor:
    """Return an operand of the case as this column has it: its dtype, and its layout in memory."""
    # fp32 masters are what training has. Columns without autocast would compute in fp32 with them: they get bf16.
    tensor = case.given[name].detach()
    if column == "exact":
        return tensor.double()
    if name in case.masters and column in (STOCK, COMPILED, LIBRARY):
        tensor = tensor.to(torch.bfloat16)
    if name in case.channels_first and column in (STOCK, AUTOCAST, COMPILED):
        return tensor.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return tensor


def rows_of(case: Case) -> list[Row]:
    """Return the case's rows, not measured yet."""
    traffic = case.traffic
    rows = [Row(case.op, case.shape, PASSES[0], traffic.forward, traffic.formula)]
    if case.trained:
        total = traffic.forward + traffic.backward
        rows.append(Row(case.op, case.shape, PASSES[1], total, traffic.formula))
    for row in rows:
        row.library = case.library[0] if case.library else None
    return rows


def measure(case: Case, row: Row, clock: Clock, rate: float, seconds: float) -> None:
    """Fill in the row; a column that fails says why and the others go on."""
    has_library = case.library is not None and clock.device.type == "cuda"
    columns = [name for name in COLUMNS if name != LIBRARY or has_library]
    bound: dict[str, _Bound] = {}
    for name in columns:
        row.cells[name] = Cell()
        _try(row.cells[name], lambda name=name: bound.setdefault(name, _Bound(case, name)))
    _errors(case, row, bound)
    calls = {name: column.call(row.passed) for name, column in bound.items()}
    for name, call in calls.items():
        cell = row.cells[name]
        if cell.failed is None:
            _try(cell, partial(_count, cell, call, clock))
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    # Columns take turns, so that a clock that slows down over a row slows all of them.
    for _ in range(REPETITIONS):
        for name, call in calls.items():
            if row.cells[name].failed is None:
                _try(row.cells[name], lambda name=name, call=call: samples[name].append(
                    clock.samples(call, seconds / REPETITIONS / len(calls))
                ))  # fmt: skip
    for name, repetitions in samples.items():
        if len(repetitions) == REPETITIONS:
            row.cells[name].times = timing.summarize(repetitions)
    _try(row.cells[OURS], lambda: _floor(case, row, clock, rate))


def _try(cell: Cell, action: Callable[[], object]) -> None:
    """Do it, or note in the cell why it failed."""
    try:
        action()
    except FAILURES as error:
        # Out of memory here, the next column may still fit: what this one held is given back.
        first = (str(error).strip() or "no message").splitlines()[0]
        cell.failed = f"{type(error).__name__}: {first[:160]}"
        gc.collect()
        torch.cuda.empty_cache()


def _count(cell: Cell, call: Callable[[], object], clock: Clock) -> None:
    """Fill in peak memory and launches."""
    cell.peak_bytes, cell.launches = clock.peak_bytes(call), clock.launches(call)


def _errors(case: Case, row: Row, bound: dict[str, _Bound]) -> None:
    """Fill in each column's largest relative difference from fp64, over outputs and gradients."""
    reference: list[Tensor] = []
    failed = Cell()
    _try(failed, lambda: reference.extend(_values(_Bound(case, "exact"), row.passed)))
    for name, column in bound.items():
        cell = row.cells[name]
        if failed.failed is None:
            _try(cell, lambda cell=cell, column=column: setattr(
                cell, "error", _difference(_values(column, row.passed), reference)
            ))  # fmt: skip


def _values(bound: _Bound, passed: str) -> list[Tensor]:
    """Return a column's outputs and, of both passes, gradients."""
    values = list(bound.forward())
    if passed != PASSES[0]:
        values += bound.both()
    return [value.detach() for value in values]


def _difference(values: list[Tensor], exact: list[Tensor]) -> float:
    """Return the root mean square of the difference over that of the exact values, of the worst tensor."""
    worst = torch.stack(
        [((v.double() - e).square().mean() / e.square().mean()).sqrt() for v, e in zip(values, exact, strict=True)]
    ).max()  # fmt: skip
    return float(worst)


def _floor(case: Case, row: Row, clock: Clock, rate: float) -> None:
    """Fill in the milliseconds of the bytes at the copy's rate, and of the products that nobody can leave out."""
    if case.base is not None:
        only = dataclasses.replace(case, stock=case.base, trained=("x",))
        products = _Bound(only, STOCK)
        samples = [clock.samples(products.call(row.passed), 0.05) for _ in range(REPETITIONS)]
        row.base_ms = timing.summarize(samples).p50
    row.floor_ms = 1e3 * row.bytes / rate + row.base_ms
