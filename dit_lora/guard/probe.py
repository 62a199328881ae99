"""Find the first module and the first op that turn finite inputs into a value that is not finite.

Runs one replayed micro-batch, forward and backward, with forward hooks on every module and a dispatch mode that sees
every op. Slow, since the host reads each op's output; used only after a step has failed.
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

_TRAIL = 12  # number of values kept from before the first bad value

_OF_RANKS = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of communication ops: they only move values, and some return before the values have arrived."""


@dataclass(frozen=True)
class Step:
    """One value on the way: the op that computed it, and its distance from the end of its dtype's range."""

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
    """Dotted name; empty outside the model, for example in the loss."""
    direction: str
    """`forward` or `backward`."""
    dtype: str
    kind: str
    """`inf` or `nan`."""


@dataclass
class Trace:
    """The result of one probed run."""

    origins: list[BadOp] = field(default_factory=list)
    """Bad ops in order of execution; if the enclosing module's output was finite, they are in `hidden` instead."""
    hidden: list[BadOp] = field(default_factory=list)
    trail: list[Step] = field(default_factory=list)
    """The values before the first bad op, oldest first."""
    bad_inputs: dict[str, str] = field(default_factory=dict)
    """Descriptions of the model's arguments that were not finite, by argument name."""

    @property
    def origin(self) -> BadOp | None:
        """The first bad op; None if there is none."""
        return self.origins[0] if self.origins else None


@dataclass
class _Frame:
    """A module's forward call; from `start` to `end` are the autograd sequence numbers of its nodes."""

    name: str
    start: int
    first_origin: int
    end: int | None = None


class Probe(TorchDispatchMode):
    """Observes one run of `model`; the result is in `trace`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trace = Trace()
        self._stack: list[_Frame] = []
        self._frames: list[_Frame] = []
        self._recent: deque[Step] = deque(maxlen=_TRAIL)

    @contextmanager
    def watching(self) -> Iterator[Trace]:
        """Observe every op and every module of the model inside the context."""
        # Name the model itself by its class, since an empty name means outside the model.
        names = {m: name or stock_class(m).__name__ for name, m in called_modules(self.model)}
        with ExitStack() as stack:
            hook = self.model.register_forward_pre_hook(self._check_inputs, with_kwargs=True)
            stack.enter_context(hook)
            for module, name in names.items():
                stack.enter_context(module.register_forward_pre_hook(self._enter(name)))
                # Called even if the forward raises: the stack of modules must stay correct.
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            # Use a single thread, so that the mode sees the backward's ops too.
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
        # In-place ops and ops with `out=` write to an argument.
        is_mutable = func._schema.is_mutable
        # Inspect the inputs of an in-place op before it overwrites them.
        input_summary = _state(_read(func, args, kwargs)) if is_mutable else None
        output = func(*args, **kwargs)
        if not _makes_values(func):
            return output
        peak = _state(tree_leaves(output))
        if peak is None:
            return output
        module, direction = self._where()
        # The last finite values show how the computation came close to the limit.
        if peak.finite:
            self._recent.append(peak.step(f"{module}: {func}" if module else str(func), direction))
            return output
        # Masking with -inf is intended; any other new Inf or NaN may be the origin.
        if not _is_constant(args, kwargs):
            inputs = input_summary if is_mutable else _state(_read(func, args, kwargs))
            self._judge(str(func), peak, inputs, module, direction)
        return output

    def _judge(
        self, op: str, output: "_State", inputs: "_State | None", where: str, direction: str
    ) -> None:
        # A NaN is new even if an input was Inf (Inf - Inf); an Inf is new only if all inputs were finite.
        new_nan = output.nan and not (inputs and inputs.nan)
        new_inf = output.inf and not output.nan and not (inputs and not inputs.finite)
        if not (new_nan or new_inf):
            return
        # Only the values before the first bad op are of interest.
        if not self.trace.origins:
            self.trace.trail = list(self._recent)
        kind = "nan" if new_nan else "inf"
        self.trace.origins.append(BadOp(op, where, direction, output.dtype, kind))

    def _where(self) -> tuple[str, str]:
        """The innermost module that the current op belongs to, and the direction."""
        if self._stack:  # a forward, or its recomputation under gradient checkpointing
            return self._stack[-1].name, "forward"
        node = torch._C._current_autograd_node()
        if node is None:
            return "", "forward"
        number = node._sequence_nr()
        # Nodes created by a module's forward have sequence numbers in its interval; the last entered is innermost.
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
        # Autograd nodes from here on belong to the caller again.
        frame.end = torch.autograd._get_sequence_nr()
        # Bad ops that ran inside this module or its submodules.
        module_origins = self.trace.origins[frame.first_origin :]
        if output is None:
            # A checkpoint's recomputation stops early and has no output, so keep the result of the first run.
            self.trace.origins[frame.first_origin :] = [
                origin for origin in module_origins if origin not in self.trace.hidden
            ]
            return
        # Disable the mode, which would otherwise take these reads of the output for ops of the model.
        with _disable_current_modes():
            state = _state(tree_leaves(output))
        if state is None or not state.finite:
            return
        # The module's output is finite (after a clamp or a mask), so its bad ops are not the cause.
        self.trace.hidden += module_origins
        del self.trace.origins[frame.first_origin :]

    def _check_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        # Positional arguments are named by their position.
        named = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        leaves = [(name, leaf) for name, value in named.items() for leaf in tree_leaves(value)]
        with _disable_current_modes():
            for name, leaf in leaves:
                if isinstance(leaf, torch.Tensor) and (description := describe_bad(name, leaf)):
                    self.trace.bad_inputs[name] = description


@dataclass(frozen=True)
class _State:
    """Whether the values of some tensors, taken together, contain NaN or Inf, and their range."""

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
    """The combined state of all leaves; None without floating-point values."""
    local_tensors = (local(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    tensors = [tensor for tensor in local_tensors if has_values(tensor)]
    if not tensors:
        return None
    # One scalar per tensor, read by the host together.
    peaks = [abs_max(tensor) for tensor in tensors]
    values = torch.stack(peaks).tolist()
    # NaN counts as the largest value.
    worst = max(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))
    nan, inf = any(v != v for v in values), any(v == float("inf") for v in values)
    dtype, peak = tensors[worst].dtype, values[worst]
    # A value that is not finite has no headroom.
    margin = headroom(peak, dtype) if not (nan or inf) else 0.0
    return _State(nan, inf, peak, str(dtype).removeprefix("torch."), margin)


def _read(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an op reads; `copy_` only writes its first argument."""
    # The values that `copy_` overwrites do not affect its result.
    read_args = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else args
    return tree_leaves((read_args, dict(kwargs)))


def _makes_values(func: Any) -> bool:
    """False for a view, and for uninitialized memory."""
    return not func.is_view and "empty" not in func._schema.name


def _is_constant(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an op received a non-finite number on purpose, as when masks are filled with -inf."""
    numbers = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, float)]
    return any(number != number or abs(number) == float("inf") for number in numbers)
