"""How modules of a fused model are patched: which get another forward, for which kernel, and how each is restored.

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

from dit_lora.errors import DitLoraError, format_list
from dit_lora.numerics.opaque import set_fused_module_test

OPS = ("lora_linear", "fp8", "qk_norm_rope", "ada_norm", "relu_linear_attention", "silu_dwconv_glu", "liger")
"""Ops that can replace part of a model, by their names in `kernels:`."""
ATTENTION = "attention"
"""Op name of the attention processors' patches: one call for all backends, one input for q, k and v."""
KERNELS = "kernels"
"""Name of the fallback that turns off every patch."""
_FUSION_ATTRIBUTE = "_fusion"


@dataclass
class FusedModelState:
    """State of one fused model: its patches, and which fused ops are on at the moment."""

    op_states: dict[str, bool]
    """The state of each op; one that is off runs the stock code."""
    backend: str | None = None
    """Diffusers' name of the attention backend that fused processors ask for; None for PyTorch's choice."""
    patched_modules: list[tuple[str, str]] = field(default_factory=list)
    """(op, module) of every patch."""
    skipped_modules: list[tuple[str, str, str]] = field(default_factory=list)
    """(op, module, reason) of modules that an op could have replaced and did not."""
    stock: bool = False
    """True while the whole model runs its stock code; `op_states` is ignored."""
    hooks: list["Removable"] = field(default_factory=list)
    """Hooks of the model, for as long as it is fused."""

    def is_on(self, op: str) -> bool:
        """True if patches of this op run at the moment. Patched modules ask at every call."""
        return not self.stock and self.op_states.get(op, False)

    @contextmanager
    def disable_op(self, op: str) -> Iterator[None]:
        """Context in which this fused op is off and its modules run stock code."""
        was_on = self.op_states[op]
        self.op_states[op] = False
        try:
            yield
        finally:
            self.op_states[op] = was_on

    @contextmanager
    def use_stock_code(self) -> Iterator[None]:
        """Context in which a fused model runs its stock code everywhere."""
        was_stock, self.stock = self.stock, True
        try:
            yield
        finally:
            self.stock = was_stock

    @contextmanager
    def use_default_attention_backend(self) -> Iterator[None]:
        """Context in which PyTorch, not the user's setting, chooses the attention backend of a fused model."""
        old_backend, self.backend = self.backend, None
        try:
            yield
        finally:
            self.backend = old_backend

    def get_active_ops(self) -> list[str]:
        """Names of the fused ops that are on and replaced at least one module."""
        replaced = {op for op, _ in self.patched_modules}
        return [op for op in OPS if op in replaced and self.is_on(op)]

    def format_lines(self) -> list[str]:
        """Report lines: which ops were replaced by fused kernels, which were not, and why."""
        # Number of modules by op. An op without an entry counts as on.
        counts = Counter(op for op, _ in self.patched_modules)
        active = [f"{op} ({n} modules)" for op, n in counts.items() if self.op_states.get(op, True)]
        lines = [", ".join(active)] if active else []
        reasons = Counter((op, reason) for op, _, reason in self.skipped_modules)
        lines += [f"{op}: not in {n} modules: {reason}" for (op, reason), n in reasons.items()]
        return lines


class Removable(Protocol):
    """Protocol of an object that can be removed from a model, such as a hook's handle."""

    def remove(self) -> None: ...


Forward = Callable[..., Any]
ProblemFinder = Callable[[Any], str | None]


def _accept_any_module(_module: Any) -> None:
    return None


def get_qk_op(_attention: Any) -> tuple[str, ...]:
    """The op `qk_norm_rope`, for attention whose q and k are always rotated, even if they are not normed."""
    return ("qk_norm_rope",)


def get_qk_op_if_normed(attention: Any) -> tuple[str, ...]:
    """The op `qk_norm_rope` if q and k of this attention are normed, else nothing: this attention rotates nothing."""
    return ("qk_norm_rope",) if attention.norm_q is not None else ()


@dataclass(frozen=True)
class ForwardPatch:
    """Patch of a module class: a fused forward that replaces the stock one while its op is on."""

    target_class: str
    """`module.ClassName`; subclasses do not match."""
    op: str
    forward: Forward
    """Called with the module and the stock forward's arguments."""
    find_problem: ProblemFinder = _accept_any_module
    """Why this instance keeps its own forward, in a few words; None if it can be patched."""
    find_current_problem: ProblemFinder = _accept_any_module
    """Why this instance would run its own forward at the moment: the patch asks again at every call."""
    replaces_submodules: bool = False
    """True if the forward calls none of the module's submodules."""


@dataclass(frozen=True)
class ProcessorPatch:
    """Patch of an attention layer: a fused processor that replaces a stock one."""

    target_class: str
    op: str
    build_processor: Callable[[Any, FusedModelState, Any], Any]
    """Makes the fused processor from the stock one, the fusion and the attention layer. It keeps the stock one as
    `stock`, and runs that while it is off."""
    find_problem: ProblemFinder = _accept_any_module
    """Why this attention module keeps its stock processor; None if it can be patched."""
    get_extra_ops: Callable[[Any], tuple[str, ...]] | None = None
    """Other ops that the processor runs on this attention layer while they are on; None for no others."""


def get_class_name(instance: object) -> str:
    """Module and class name of an object, as `module.ClassName`."""
    # Compare classes by name: no need to import their modules, or packages that may be missing.
    kind = type(instance)
    return f"{kind.__module__}.{kind.__qualname__}"


def get_fusion(model: nn.Module) -> FusedModelState | None:
    """The `FusedModelState` of a fused model or of any of its patched modules; None if it is not fused."""
    return model.__dict__.get(_FUSION_ATTRIBUTE)


def set_fusion(module: nn.Module, fusion: FusedModelState) -> None:
    """Record on a module which patch state (`FusedModelState`) it belongs to."""
    # Bypass nn.Module's `__setattr__`, so that no walk over parameters, buffers or submodules finds it: state dicts
    # and PEFT see the stock model.
    module.__dict__[_FUSION_ATTRIBUTE] = fusion


def patch_forward(name: str, module: nn.Module, fusion: FusedModelState, patch: ForwardPatch) -> None:
    """Replace the forward of one module instance with the fused one, or record why not."""
    reason = patch.find_problem(module)
    if reason is None and "forward" in module.__dict__:
        reason = "its forward is wrapped already; fuse before hooks and offload are added"
    if reason is not None:
        fusion.skipped_modules.append((patch.op, name, reason))
        return
    set_fusion(module, fusion)
    # Set on the instance: PEFT, FSDP's wrapping and checkpointing test its class. `Module.__call__` finds this
    # attribute, so hooks run as before.
    module.forward = MethodType(_make_forward_with_op_switch(patch.op, patch.forward, type(module).forward), module)
    # The submodules are then not called: code that observes modules one by one must not expect them.
    if patch.replaces_submodules:
        set_fused_module_test(module, partial(fusion.is_on, patch.op))
    # Patched either way: adapters are merged and disabled at run time, and the forward checks at every call.
    reason = patch.find_current_problem(module)
    if reason is None:
        fusion.patched_modules.append((patch.op, name))
    else:
        fusion.skipped_modules.append((patch.op, name, f"{reason}, at the moment"))


def _make_forward_with_op_switch(op: str, fused: Forward, stock: Forward) -> Forward:
    """Create a forward that runs `fused` while the op is on, and `stock` while it is off."""

    @functools.wraps(stock)  # Diffusers and Accelerate read its signature
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Read from the module, not closed over: a deep copy of a fused model has its own FusedModelState.
        if module.__dict__[_FUSION_ATTRIBUTE].is_on(op):
            return fused(module, *args, **kwargs)
        return stock(module, *args, **kwargs)

    forward.fused_op = op  # type: ignore[attr-defined]
    return forward


def patch_processor(name: str, attention: Any, fusion: FusedModelState, patch: ProcessorPatch) -> None:
    """Replace the processor of an attention layer with the fused one, or record why not."""
    reason = patch.find_problem(attention)
    if reason is not None:
        fusion.skipped_modules.append((patch.op, name, reason))
        return
    # Diffusers' extension point: the processor is an attribute that `Attention.forward` calls.
    set_fusion(attention, fusion)
    attention.processor = patch.build_processor(attention.processor, fusion, attention)
    # Recorded for each op that it runs, so that each of them has a fallback and a line in the report.
    extra_ops = () if patch.get_extra_ops is None else patch.get_extra_ops(attention)
    fusion.patched_modules += [(op, name) for op in (patch.op, *extra_ops) if fusion.op_states.get(op)]


def restore_modules(model: nn.Module) -> None:
    """Restore every module's stock code. Raises `DitLoraError` with a list if later hooks wrap a patched forward."""
    # All patched modules; wrapped ones are checked before the first is restored.
    marked = [(n, m) for n, m in model.named_modules() if _FUSION_ATTRIBUTE in m.__dict__]
    # The model itself (empty name) is only marked: a forward that Accelerate put on it stays.
    # Any other forward on an instance is a wrapper that was added around ours later, and calls it.
    wrapped = [n for n, m in marked if n and "forward" in m.__dict__ and not has_patched_forward(m)]
    if wrapped:
        raise DitLoraError(
            format_list("cannot unfuse: remove the hooks (offload, cache) that were added since", wrapped)
        )
    for _, module in marked:
        if has_patched_forward(module):
            del module.__dict__["forward"]
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "fusion"):  # ours, not a processor that was set later
            module.processor = processor.stock
        set_fused_module_test(module, None)
        del module.__dict__[_FUSION_ATTRIBUTE]
    model.__dict__.pop("fuse_qkv_projections", None)


def has_patched_forward(module: nn.Module) -> bool:
    """True if a module instance has a patched forward that no later hook wraps."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, MethodType) and hasattr(forward.__func__, "fused_op")


def refuse_projection_fusing(model: nn.Module, has_lora: Callable[[nn.Module], bool]) -> None:
    """Refuse `fuse_qkv_projections` on a model with adapters: raises `DitLoraError` if it was called, or when it is.

    It copies only the base weights into a new layer, so the adapters of q, k and v would be lost silently.
    """
    # Set by Diffusers on each layer whose q, k and v it has joined.
    fused = any(getattr(module, "fused_projections", False) for module in model.modules())
    if fused and has_lora(model):
        raise DitLoraError(_DROPS_LORA)
    stock_method = getattr(model, "fuse_qkv_projections", None)
    if stock_method is None:
        return

    def fuse_qkv_projections(module: Any, *args: Any, **kwargs: Any) -> None:
        if has_lora(module):
            raise DitLoraError(_DROPS_LORA)
        type(module).fuse_qkv_projections(module, *args, **kwargs)

    # On the instance, in front of the class's own method; `restore_modules` takes it off.
    model.__dict__["fuse_qkv_projections"] = MethodType(fuse_qkv_projections, model)


_DROPS_LORA = (
    "fuse_qkv_projections drops the adapters of q, k and v (diffusers issue 11903); call unfuse_qkv_projections first"
)


def get_stock_processor(module: nn.Module) -> Any:
    """The stock processor of an attention layer, without wrappers; None for modules without a processor."""
    # A model family may have wrapped it before (Sana's in fp32): the inner processor decides about the patch.
    processor: Any = getattr(module, "processor", None)
    while hasattr(processor, "stock"):
        processor = processor.stock
    return processor


def find_unsupported_norm(norms: Iterable[object], *classes: type) -> str | None:
    """Reason that names the first norm whose class is not in `classes`; None if all are. Subclasses do not count."""
    for norm in norms:
        if type(norm) not in classes:
            return f"one of its norms is a {type(norm).__name__}"
    return None


def make_norm_class_check(names: Sequence[str], *classes: type) -> ProblemFinder:
    """Create a check that names the first of a module's norms (by attribute) whose class is not in `classes`."""

    def find_problem(module: Any) -> str | None:
        return find_unsupported_norm((getattr(module, name) for name in names), *classes)

    return find_problem


def find_patch(patches: Sequence[Any], instance: object) -> Any | None:
    """The patch that is registered for exactly this object's class; None if there is none.

    A subclass may compute something else.
    """
    name = get_class_name(instance)
    return next((patch for patch in patches if patch.target_class == name), None)
