"""Defines a fused model: which modules have another forward, for which kernel, and how each is put back.

A patch lives on the instance. Class, parameters, buffers, submodules, names and hooks stay as they were, so state
dicts, PEFT, checkpointing and saving see the stock model. Each patch belongs to one op; while that op is off, the
stock code runs.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, Protocol

from torch import nn

from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.opaque import set_whole

OPS = (
    "lora_linear",
    "fp8",
    "qk_norm_rope",
    "ada_norm",
    "relu_linear_attention",
    "silu_dwconv_glu",
    "liger",
)
"""Ops that can replace part of a model, by their names in `kernels:`."""
ATTENTION = "attention"
"""Name of the switch of attention processors' patches: one call for all backends, one input for q, k and v."""
KERNELS = "kernels"
"""The switch of everything that was replaced."""
_MARK = "_fusion"


@dataclass
class Fusion:
    """The patches of one model, and which of them are on at the moment."""

    on: dict[str, bool]
    """The state of each op; one that is off runs the stock code."""
    backend: str | None = None
    """Diffusers' name of the attention backend that fused processors ask for; None for PyTorch's choice."""
    replaced: list[tuple[str, str]] = field(default_factory=list)
    """(op, module) of every patch."""
    kept: list[tuple[str, str, str]] = field(default_factory=list)
    """(op, module, reason) of what an op could have replaced and did not."""
    stock: bool = False
    """True while the whole model runs its own code, whatever `on` says."""
    hooks: list["Removable"] = field(default_factory=list)
    """Hooks of the model, for as long as it is fused."""

    def is_on(self, op: str) -> bool:
        """Return whether patches of this op run at the moment; modules ask at every call."""
        return not self.stock and self.on.get(op, False)

    @contextmanager
    def without(self, op: str) -> Iterator[None]:
        """Switch this op off within it."""
        before = self.on[op]
        self.on[op] = False
        try:
            yield
        finally:
            self.on[op] = before

    @contextmanager
    def all_stock(self) -> Iterator[None]:
        """Let the model run its own code everywhere within it."""
        before, self.stock = self.stock, True
        try:
            yield
        finally:
            self.stock = before

    @contextmanager
    def any_backend(self) -> Iterator[None]:
        """Let PyTorch choose the attention backend within it."""
        before, self.backend = self.backend, None
        try:
            yield
        finally:
            self.backend = before

    def used(self) -> list[str]:
        """Return the ops that are on and replaced something."""
        replaced = {op for op, _ in self.replaced}
        return [op for op in OPS if op in replaced and self.is_on(op)]

    def lines(self) -> list[str]:
        """Return a report: what was replaced, what was not, and why."""
        counts = Counter(op for op, _ in self.replaced)
        lines = [f"{op}: {n} modules" for op, n in counts.items() if self.on.get(op, True)]
        reasons = Counter((op, reason) for op, _, reason in self.kept)
        lines += [f"{op}: not in {n} modules: {reason}" for (op, reason), n in reasons.items()]
        return lines


class Removable(Protocol):
    """A hook's handle, or whatever else is undone when the model is."""

    def remove(self) -> None: ...


Forward = Callable[..., Any]
WhyNot = Callable[[Any], str | None]


def _always(_module: Any) -> None:
    """Give no reason against a patch."""
    return None


def _nothing(_attention: Any) -> tuple[str, ...]:
    """Name no further op."""
    return ()


def qk_always(_attention: Any) -> tuple[str, ...]:
    """Name the kernel of q and k: they are rotated, whether they are normed or not."""
    return ("qk_norm_rope",)


def qk_if_normed(attention: Any) -> tuple[str, ...]:
    """Name the kernel of q and k where they are normed, as nothing rotates them."""
    return ("qk_norm_rope",) if attention.norm_q is not None else ()


@dataclass(frozen=True)
class ForwardPatch:
    """A forward in place of a class's own, for as long as `op` is on."""

    of: str
    """`module.ClassName`; a subclass is another class."""
    op: str
    forward: Forward
    """Called with the module and the stock forward's arguments."""
    why_not: WhyNot = _always
    """Why this instance keeps its own forward, in a few words; None if it need not."""
    for_now: WhyNot = _always
    """Why this instance would run its own forward at the moment: the patch asks again at every call."""
    whole: bool = False
    """True if it calls none of the module's submodules."""


@dataclass(frozen=True)
class ProcessorPatch:
    """An attention processor in place of a stock one."""

    of: str
    op: str
    make: Callable[[Any, Fusion, Any], Any]
    """Makes a fused processor of the stock one and the attention layer; the result keeps the first as `stock`, for when it is off."""
    why_not: WhyNot = _always
    """Asked of the attention module."""
    also: Callable[[Any], tuple[str, ...]] = _nothing
    """Other ops that it runs on this attention layer while they are on."""


def class_name(thing: object) -> str:
    """Return `module.ClassName` of an instance's class."""
    # By name, so that a patch of a class costs no import of its module, and none of a package that may be missing.
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def fusion_of(model: nn.Module) -> Fusion | None:
    """Return what `fuse` did to this model or, for one of its modules, to the model that it is part of."""
    return model.__dict__.get(_MARK)


def mark(module: nn.Module, fusion: Fusion) -> None:
    """Note on the module what it is part of."""
    # Past nn.Module's `__setattr__`, and found by no walk over parameters, buffers or submodules: a state dict and PEFT
    # see the stock model.
    module.__dict__[_MARK] = fusion


def patch_forward(name: str, module: nn.Module, fusion: Fusion, patch: ForwardPatch) -> None:
    """Put the patch's forward on this instance, or note why not."""
    reason = patch.why_not(module)
    if reason is None and "forward" in module.__dict__:
        reason = "its forward is wrapped already; fuse before hooks and offload are added"
    if reason is not None:
        fusion.kept.append((patch.op, name, reason))
        return
    mark(module, fusion)
    # On the instance: its class stays what others ask for, as PEFT, FSDP's wrapping and checkpointing do. A call goes
    # through `Module.__call__` to this attribute, so that hooks run as before.
    module.forward = MethodType(_switched(patch.op, patch.forward, type(module).forward), module)
    # Its parts are then not called, and whoever observes modules one by one must not expect them.
    if patch.whole:
        set_whole(module, partial(fusion.is_on, patch.op))
    # Patched all the same: adapters are merged and disabled at run time, and the forward looks again at every call.
    reason = patch.for_now(module)
    if reason is None:
        fusion.replaced.append((patch.op, name))
    else:
        fusion.kept.append((patch.op, name, f"{reason}, at the moment"))


def _switched(op: str, fused: Forward, stock: Forward) -> Forward:
    """Return a forward that is the fused one while the op is on, and the class's own while it is off."""

    @functools.wraps(stock)  # Diffusers and Accelerate read its signature
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Read from the module and not closed over: a deep copy of a fused model has a Fusion of its own.
        if module.__dict__[_MARK].is_on(op):
            return fused(module, *args, **kwargs)
        return stock(module, *args, **kwargs)

    forward.fused_op = op  # type: ignore[attr-defined]
    return forward


def patch_processor(name: str, attention: Any, fusion: Fusion, patch: ProcessorPatch) -> None:
    """Put the patch's processor on this attention layer, or note why not."""
    reason = patch.why_not(attention)
    if reason is not None:
        fusion.kept.append((patch.op, name, reason))
        return
    # The processor is the place that Diffusers has for this: it is an attribute, and `Attention.forward` calls it.
    mark(attention, fusion)
    attention.processor = patch.make(attention.processor, fusion, attention)
    # Noted for each op that it runs, so that each of them has a switch and a line in the report.
    fusion.replaced += [
        (op, name) for op in (patch.op, *patch.also(attention)) if fusion.on.get(op)
    ]


def restore(model: nn.Module) -> None:
    """Put every module back as it was; raise `DitLoraError`, listing them, if hooks now wrap what would have to go."""
    marked = [(n, m) for n, m in model.named_modules() if _MARK in m.__dict__]
    # The model itself is only marked: what Accelerate puts on it stays.
    # Any other forward on an instance is a wrapper that was put around ours since, and calls it.
    wrapped = [n for n, m in marked if n and "forward" in m.__dict__ and not runs_patch(m)]
    if wrapped:
        raise DitLoraError(
            listed(
                "cannot unfuse: remove the hooks (offload, cache) that were added since", wrapped
            )
        )
    for _, module in marked:
        if runs_patch(module):
            del module.__dict__["forward"]
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "fusion"):  # ours, and not one that was set since
            module.processor = processor.stock
        set_whole(module, None)
        del module.__dict__[_MARK]
    model.__dict__.pop("fuse_qkv_projections", None)


def runs_patch(module: nn.Module) -> bool:
    """Return whether the forward that was put on this instance is what a call of it runs; later hooks may wrap it."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, "fused_op")


def refuse_projection_fusing(model: nn.Module, has_lora: Callable[[nn.Module], bool]) -> None:
    """Raise if Diffusers' `fuse_qkv_projections` was called on a model with adapters, and from now on when it is.

    It copies the base weights alone into a new layer: the adapters of q, k and v vanish without a word.
    """
    fused = any(getattr(module, "fused_projections", False) for module in model.modules())
    if fused and has_lora(model):
        raise DitLoraError(_DROPS_LORA)
    stock = getattr(model, "fuse_qkv_projections", None)
    if stock is None:
        return

    def fuse_qkv_projections(module: Any, *args: Any, **kwargs: Any) -> None:
        if has_lora(module):
            raise DitLoraError(_DROPS_LORA)
        type(module).fuse_qkv_projections(module, *args, **kwargs)

    # On the instance, in front of the class's own method; `restore` takes it off.
    model.__dict__["fuse_qkv_projections"] = MethodType(fuse_qkv_projections, model)


_DROPS_LORA = (
    "fuse_qkv_projections leaves the adapters of q, k and v out of the model (diffusers issue 11903); "
    "call unfuse_qkv_projections: dit_lora.fuse shares their input without that"
)


def stock_processor(module: nn.Module) -> Any:
    """Return the processor of an attention layer below any that only wraps it; None for other modules."""
    # A family may have wrapped it before (Sana's in fp32): the patch is chosen by what is inside.
    processor: Any = getattr(module, "processor", None)
    while hasattr(processor, "stock"):
        processor = processor.stock
    return processor


def other_norm(norms: Iterable[object], *classes: type) -> str | None:
    """Return a reason that names the first norm of another class than these, subclasses included; None if none is."""
    for norm in norms:
        if type(norm) not in classes:
            return f"one of its norms is a {type(norm).__name__}"
    return None


def matches(patches: Sequence[Any], thing: object) -> Any | None:
    """Return the patch of exactly this class: a subclass may compute something else."""
    name = class_name(thing)
    return next((patch for patch in patches if patch.of == name), None)
