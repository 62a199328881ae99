"""Find the first module and the first op that turn finite inputs into a value that is not finite.

Runs one replayed micro-batch, forward and backward, with forward hooks on every module and a dispatch mode that sees
every op. Slow, since the host reads each op's output; used only after a step has failed.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dit_lora.numerics.dtensors import get_local_tensor, get_original_class
from dit_lora.numerics.finite import abs_max, can_hold_nonfinite, compute_headroom, describe_bad_values
from dit_lora.numerics.opaque import iterate_called_modules

_TRAIL_LENGTH = 12  # number of values kept from before the first bad value

_COMMUNICATION_NAMESPACES = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of communication ops: they only move values, and some return before the values have arrived."""


@dataclass(frozen=True)
class OpTraceEntry:
    """One op on the way to a bad value, and how far its output is from the end of the dtype's range."""

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
    """`has_inf` or `has_nan`."""


@dataclass
class OpTrace:
    """Result of observing one forward and backward pass op by op."""

    origins: list[BadOp] = field(default_factory=list)
    """Bad ops in order of execution. If the enclosing module's output was finite, they are in `hidden_origins`."""
    hidden_origins: list[BadOp] = field(default_factory=list)
    trail: list[OpTraceEntry] = field(default_factory=list)
    """The values before the first bad op, oldest first."""
    bad_inputs: dict[str, str] = field(default_factory=dict)
    """Descriptions of the model's arguments that were not finite, by argument name."""

    @property
    def first_bad_op(self) -> BadOp | None:
        """The first op that created a bad value; None if there is none."""
        return self.origins[0] if self.origins else None


@dataclass
class _ModuleCallFrame:
    """A module's forward call, with the range of autograd sequence numbers of its nodes (`start` to `end`)."""

    name: str
    start: int
    first_origin_index: int
    end: int | None = None


class Probe(TorchDispatchMode):
    """Dispatch mode that observes every op of one run of a model; `trace` shows where bad values start."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trace = OpTrace()
        self._stack: list[_ModuleCallFrame] = []
        self._frames: list[_ModuleCallFrame] = []
        self._recent_entries: deque[OpTraceEntry] = deque(maxlen=_TRAIL_LENGTH)

    @contextmanager
    def observe_model_ops(self) -> Iterator[OpTrace]:
        """Observe every op and every module of the model inside the context; the result is in `trace`."""
        # Name the model itself by its class, since an empty name means outside the model.
        names = {m: name or get_original_class(m).__name__ for name, m in iterate_called_modules(self.model)}
        with ExitStack() as stack:
            stack.enter_context(self.model.register_forward_pre_hook(self._check_inputs, with_kwargs=True))
            for module, name in names.items():
                stack.enter_context(module.register_forward_pre_hook(partial(self._enter_module, name)))
                # Called even if the forward raises: the stack of modules must stay correct.
                stack.enter_context(module.register_forward_hook(self._leave_module, always_call=True))
            # Use a single thread, so that the mode sees the backward's ops too.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(self)
            yield self.trace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COMMUNICATION_NAMESPACES:
            return func(*args, **kwargs)
        # In-place ops and ops with `out=` write to an argument.
        is_mutable = func._schema.is_mutable
        # Inspect the inputs of an in-place op before it overwrites them.
        input_summary = _summarize_values(_list_inputs(func, args, kwargs)) if is_mutable else None
        output = func(*args, **kwargs)
        # Views and uninitialized memory compute no values.
        if func.is_view or "empty" in func._schema.name:
            return output
        peak = _summarize_values(tree_leaves(output))
        if peak is None:
            return output
        module, direction = self._locate_op()
        # The last finite values show how the computation came close to the limit.
        if peak.is_finite:
            self._recent_entries.append(peak.to_trail_entry(f"{module}: {func}" if module else str(func), direction))
            return output
        # Masking with -inf is intended; any other new Inf or NaN may be the origin.
        numbers = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, float)]
        if all(map(math.isfinite, numbers)):
            inputs = input_summary if is_mutable else _summarize_values(_list_inputs(func, args, kwargs))
            self._record_new_origin(str(func), peak, inputs, module, direction)
        return output

    def _record_new_origin(
        self, op: str, output: "_ValueSummary", inputs: "_ValueSummary | None", module: str, direction: str
    ) -> None:
        # A NaN is new even if an input was Inf (Inf - Inf); an Inf is new only if all inputs were finite.
        new_nan = output.has_nan and not (inputs and inputs.has_nan)
        new_inf = output.has_inf and not output.has_nan and not (inputs and not inputs.is_finite)
        if not (new_nan or new_inf):
            return
        # Only the values before the first bad op are of interest.
        if not self.trace.origins:
            self.trace.trail = list(self._recent_entries)
        kind = "nan" if new_nan else "inf"
        self.trace.origins.append(BadOp(op, module, direction, output.dtype, kind))

    def _locate_op(self) -> tuple[str, str]:
        """Find the innermost module that the current op belongs to, and whether it runs forward or backward."""
        if self._stack:  # a forward, or its recomputation under gradient checkpointing
            return self._stack[-1].name, "forward"
        node = torch._C._current_autograd_node()
        if node is None:
            return "", "forward"
        number = node._sequence_nr()
        # Nodes created by a module's forward have sequence numbers in its interval; the last entered is innermost.
        inside = [frame for frame in self._frames if frame.start <= number < (frame.end or 0)]
        return (inside[-1].name if inside else ""), "backward"

    def _enter_module(self, name: str, _module: nn.Module, _args: Any) -> None:
        frame = _ModuleCallFrame(name, torch.autograd._get_sequence_nr(), len(self.trace.origins))
        self._stack.append(frame)
        self._frames.append(frame)

    def _leave_module(self, _module: nn.Module, _args: Any, output: Any) -> None:
        frame = self._stack.pop()
        # Autograd nodes from here on belong to the caller again.
        frame.end = torch.autograd._get_sequence_nr()
        # Bad ops that ran inside this module or its submodules.
        module_origins = self.trace.origins[frame.first_origin_index :]
        if output is None:
            # A checkpoint's recomputation stops early and has no output, so keep the result of the first run.
            new_origins = [origin for origin in module_origins if origin not in self.trace.hidden_origins]
            self.trace.origins[frame.first_origin_index :] = new_origins
            return
        # Disable the mode, which would otherwise take these reads of the output for ops of the model.
        with _disable_current_modes():
            state = _summarize_values(tree_leaves(output))
        if state is None or not state.is_finite:
            return
        # The module's output is finite (after a clamp or a mask), so its bad ops are not the cause.
        self.trace.hidden_origins += module_origins
        del self.trace.origins[frame.first_origin_index :]

    def _check_inputs(self, _module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        # Positional arguments are named by their position.
        named = {f"argument {i}": value for i, value in enumerate(args)} | dict(kwargs)
        leaves = [(name, leaf) for name, value in named.items() for leaf in tree_leaves(value)]
        with _disable_current_modes():
            for name, leaf in leaves:
                if isinstance(leaf, torch.Tensor) and (description := describe_bad_values(name, leaf)):
                    self.trace.bad_inputs[name] = description


@dataclass(frozen=True)
class _ValueSummary:
    """Summary of the values of some tensors: whether any is NaN or Inf, and their range."""

    has_nan: bool
    has_inf: bool
    peak: float
    dtype: str
    headroom: float

    @property
    def is_finite(self) -> bool:
        return not (self.has_nan or self.has_inf)

    def to_trail_entry(self, name: str, direction: str) -> OpTraceEntry:
        return OpTraceEntry(name, direction, self.dtype, self.peak, self.headroom)


def _summarize_values(leaves: Sequence[Any]) -> _ValueSummary | None:
    """Summary over all tensors of an input or output: finite or not, magnitude, dtype. None without float tensors."""
    local_tensors = (get_local_tensor(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    tensors = [tensor for tensor in local_tensors if can_hold_nonfinite(tensor)]
    if not tensors:
        return None
    # One scalar per tensor, read by the host together.
    values = torch.stack([abs_max(tensor) for tensor in tensors]).tolist()
    # NaN counts as the largest value.
    worst = max(range(len(values)), key=lambda i: (values[i] != values[i], values[i]))
    nan, inf = any(v != v for v in values), any(v == float("inf") for v in values)
    dtype, peak = tensors[worst].dtype, values[worst]
    # A value that is not finite has no headroom.
    margin = compute_headroom(peak, dtype) if not (nan or inf) else 0.0
    return _ValueSummary(nan, inf, peak, str(dtype).removeprefix("torch."), margin)


def _list_inputs(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    # The values that `copy_` overwrites do not affect its result.
    read_args = args[1:] if func.overloadpacket is torch.ops.aten.copy_ else args
    return tree_leaves((read_args, dict(kwargs)))
