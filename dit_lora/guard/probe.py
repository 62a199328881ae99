"""Finds the first module and the first op that turn finite inputs into a value that is not finite.

Runs one replayed micro-batch, forward and backward, under forward hooks on every module and a dispatch mode
that sees every op. Slow (each op's output is read by the host), and only ever used after the gate tripped.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.dtensors import local, stock_class
from dit_lora.numerics.finite import abs_max, describe_bad, has_values, headroom
from dit_lora.numerics.opaque import called_modules

_TRAIL = 12  # entries kept upstream of the first bad value

_OF_RANKS = ("c10d", "_c10d_functional", "fsdp")
"""Ops by which ranks share weights and gradients: they move values, and some return before they are there."""


@dataclass(frozen=True)
class Step:
    """One value on the way: what made it and how close it came to the end of its dtype's range."""

    name: str
    direction: str
    dtype: str
    peak: float
    headroom: float


@dataclass(frozen=True)
class BadOp:
    """An op whose inputs were finite (or, for NaN, free of NaN) and whose output was not."""

    op: str
    module: str
    """Dotted name; empty outside the model, for instance in the loss."""
    direction: str
    """`forward` or `backward`."""
    dtype: str
    kind: str
    """`inf` or `nan`."""


@dataclass
class Trace:
    """The result of one probed run."""

    origins: list[BadOp] = field(default_factory=list)
    """Origins in order of execution; those that the module around them hid again are in `hidden`."""
    hidden: list[BadOp] = field(default_factory=list)
    trail: list[Step] = field(default_factory=list)
    """The values before the first origin, oldest first."""
    bad_inputs: dict[str, str] = field(default_factory=dict)
    """Arguments of the model itself that were not finite, described."""

    @property
    def origin(self) -> BadOp | None:
        """The first origin, where it began; None if nothing did."""
        return self.origins[0] if self.origins else None


@dataclass
class _Frame:
    """A module's forward under way; `end` closes its interval of autograd sequence numbers."""

    name: str
    start: int
    first_origin: int
    end: int | None = None


class Probe(TorchDispatchMode):
    """Watches one run of `model`; the result is in `trace`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trace = Trace()
        self._stack: list[_Frame] = []
        self._frames: list[_Frame] = []
        self._recent: deque[Step] = deque(maxlen=_TRAIL)

    @contextmanager
    def watching(self) -> Iterator[Trace]:
        """Watch every op and every module of the model within."""
        # The model itself by its class: no name means outside it.
        names = {m: name or stock_class(m).__name__ for name, m in called_modules(self.model)}
        with ExitStack() as stack:
            hook = self.model.register_forward_pre_hook(self._check_inputs, with_kwargs=True)
            stack.enter_context(hook)
            for module, name in names.items():
                stack.enter_context(module.register_forward_pre_hook(self._enter(name)))
                # Called too where the forward raises: the stack of modules must stay right.
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            # On one thread, so that the mode sees the backward's ops too.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self)
            yield self.trace

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _OF_RANKS:
            return func(*args, **kwargs)
        mutable = func._schema.is_mutable
        # An op that writes over its input shows what it read before it runs, and not after.
        before = _state(_read(func, args, kwargs)) if mutable else None
        output = func(*args, **kwargs)
        if not _makes_values(func):
            return output
        peak = _state(tree_leaves(output))
        if peak is None:
            return output
        where, direction = self._where()
        if peak.finite:
            self._recent.append(peak.step(f"{where}: {func}" if where else str(func), direction))
            return output
        if not _is_constant(args, kwargs):
            inputs = before if mutable else _state(_read(func, args, kwargs))
            self._judge(str(func), peak, inputs, where, direction)
        return output

    def _judge(
        self, op: str, output: "_State", inputs: "_State | None", where: str, direction: str
    ) -> None:
        # A NaN is new also where an input was Inf (Inf - Inf); an Inf only where all inputs were finite.
        new_nan = output.nan and not (inputs and inputs.nan)
        new_inf = output.inf and not output.nan and not (inputs and not inputs.finite)
        if not (new_nan or new_inf):
            return
        if not self.trace.origins:
            self.trace.trail = list(self._recent)
        kind = "nan" if new_nan else "inf"
        self.trace.origins.append(BadOp(op, where, direction, output.dtype, kind))

    def _where(self) -> tuple[str, str]:
        """Return the innermost module that an op belongs to, and the direction."""
        if self._stack:  # a forward, or its recomputation under gradient checkpointing
            return self._stack[-1].name, "forward"
        node = torch._C._current_autograd_node()
        if node is None:
            return "", "forward"
        number = node._sequence_nr()
        # Nodes that a module's forward made have numbers within its interval; the last entered is innermost.
        inside = [frame for frame in self._frames if frame.start <= number < (frame.end or 0)]
        return (inside[-1].name if inside else ""), "backward"

    def _enter(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            frame = _Frame(name, torch.autograd._get_sequence_nr(), len(self.trace.origins))
            self._stack.append(frame)
            self._frames.append(frame)

        return hook

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        frame = self._stack.pop()
        frame.end = torch.autograd._get_sequence_nr()
        here = self.trace.origins[frame.first_origin :]
        if output is None:
            # A recomputation that stops as soon as it has what it needs: the first time tells what is hidden.
            self.trace.origins[frame.first_origin :] = [
                origin for origin in here if origin not in self.trace.hidden
            ]
            return
        # Else the mode would take the reads of the output for the model's ops.
        with _disable_current_modes():
            state = _state(tree_leaves(output))
        if state is None or not state.finite:
            return
        # What the module hid again (a clamp, a mask) is not what went wrong.
        self.trace.hidden += here
        del self.trace.origins[frame.first_origin :]

    def _check_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        named = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        leaves = [(name, leaf) for name, value in named.items() for leaf in tree_leaves(value)]
        with _disable_current_modes():
            for name, leaf in leaves:
                if isinstance(leaf, torch.Tensor) and (words := describe_bad(name, leaf)):
                    self.trace.bad_inputs[name] = words


@dataclass(frozen=True)
class _State:
    """Kinds and range of the values of some tensors, taken together."""

    nan: bool
    inf: bool
    peak: float
    dtype: str
    headroom: float

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf)

    def step(self, name: str, direction: str) -> Step:
        return Step(name, direction, self.dtype, self.peak, self.headroom)


def _state(leaves: Sequence[Any]) -> _State | None:
    """Return the state of all leaves together; None where there is no float value to judge."""
    values_of = (local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    tensors = [tensor for tensor in values_of if has_values(tensor)]
    if not tensors:
        return None
    peaks = [abs_max(tensor) for tensor in tensors]
    values = torch.stack(peaks).tolist()
    # A NaN counts as the largest.
    worst = max(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))
    nan, inf = any(v != v for v in values), any(v == float("inf") for v in values)
    dtype, peak = tensors[worst].dtype, values[worst]
    room = headroom(peak, dtype) if not (nan or inf) else 0.0
    return _State(nan, inf, peak, str(dtype).removeprefix("torch."), room)


def _read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that an op reads; `copy_` only writes its first."""
    read_args = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else args
    return tree_leaves((read_args, dict(kwargs)))


def _makes_values(func: Any) -> bool:
    """Return False for a view, and for memory that nothing has been written to."""
    return not func.is_view and "empty" not in func._schema.name


def _is_constant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an op was given a non-finite number, as masks are filled with -inf: it means it."""
    numbers = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, float)]
    return any(number != number or abs(number) == float("inf") for number in numbers)
