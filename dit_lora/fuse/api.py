"""`fuse` and `unfuse`: replace parts of a model with fused kernels, and undo it. The results stay the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from dit_lora.errors import DitLoraError, format_list
from dit_lora.fuse import fp8, liger
from dit_lora.fuse.attention import require_backend
from dit_lora.fuse.first_forward import FirstForwardHook
from dit_lora.fuse.lora import has_lora
from dit_lora.fuse.patches import (
    ATTENTION,
    KERNELS,
    OPS,
    FusedModelState,
    find_patch,
    get_fusion,
    get_stock_processor,
    patch_forward,
    patch_processor,
    refuse_projection_fusing,
    restore_modules,
    set_fusion,
)
from dit_lora.fuse.registry import FORWARDS, OPS_WITHOUT_TRITON, PROCESSORS
from dit_lora.fuse.transformers_attention import AttentionChoice, require_implementation
from dit_lora.guard.fallbacks import Fallback, set_model_fallbacks
from dit_lora_kernels import triton_support
from dit_lora_kernels.fp8 import find_unavailable_reason as why_no_fp8

Mode = Literal["auto", "on", "off"]
_TRANSFORMERS_ONLY = "it is for models of Transformers"


@dataclass(frozen=True)
class FuseReport:
    """Report on a fused model: which modules were replaced, which were not, and why.

    `str(report)` has one line per fact.
    """

    fusion: FusedModelState
    unavailable: Mapping[str, str]
    """Ops that `auto` leaves off on this machine, with the reason."""

    @property
    def ops(self) -> list[str]:
        """Names of the fused ops that are on and replaced at least one module."""
        return self.fusion.get_active_ops()

    def __str__(self) -> str:
        lines = self.fusion.format_lines()
        # One line for all ops with one reason: without a GPU that is nearly all of them.
        reasons: dict[str, list[str]] = {}
        for op, reason in self.unavailable.items():
            reasons.setdefault(reason, []).append(op)
        lines += [f"{', '.join(ops)}: off: {reason}" for reason, ops in reasons.items()]
        return "\n".join(f"kernels: {line}" for line in lines) or "kernels: nothing to replace"


def fuse(
    model: nn.Module, ops: Mapping[str, Mode] | None = None, *, attention: str = "auto", check: bool = True
) -> FuseReport:
    """Use fused kernels in this model's blocks and adapters. `unfuse` undoes it.

    Call it after adapters are attached and before hooks, offload, DDP and torch.compile.

    Args:
        model: A Diffusers or Transformers model. It is patched in place.
        ops: `auto`, `on` or `off` by op name. Ops without an entry are `auto`, except `fp8`, which is `off`.
            `auto` uses the kernel if it applies, the machine can run it, and parity holds. `on` also runs
            without a GPU (with the kernel's reference in plain PyTorch) and raises if parity does not hold or nothing
            in the model takes the op.
        attention: A Diffusers attention backend that supports training or, for a Transformers model, one of its
            implementations. `auto` is PyTorch's own choice.
        check: Compare the first training forward of each input shape with the stock model, values and gradients,
            before its result is used.

    Raises:
        DitLoraError: An unknown name or mode, an op or backend that cannot be used here, or a model whose q, k and v
            projections Diffusers has fused under LoRA.
    """
    # One mode for every op: those that the caller left out get their default.
    modes = _fill_kernel_modes(ops or {})
    # Fusing twice replaces the first fusion: start from the stock model again.
    if get_fusion(model) is not None:
        unfuse(model)
    # Check every argument before the first module is patched, so that an error leaves the model unchanged.
    backend = None
    if attention != "auto" and isinstance(model, PreTrainedModel):
        require_implementation(model, attention)
    elif attention != "auto":
        backend = require_backend(attention)
    reasons = {op: _find_off_reason(op, mode, model) for op, mode in modes.items()}
    unavailable = {op: reason for op, reason in reasons.items() if reason is not None}
    op_states = {op: mode != "off" and op not in unavailable for op, mode in modes.items()}
    # Fused processors come with any op: they have one input for q, k and v, which adapters share.
    fusion = FusedModelState({**op_states, ATTENTION: any(op_states.values()) or backend is not None}, backend)
    refuse_projection_fusing(model, has_lora)
    # From here on the model is changed. It is restored if a requested op replaced nothing.
    _patch_modules(model, fusion)
    _require_requested_ops(model, fusion, modes)
    set_fusion(model, fusion)  # patched or not, so that `get_fusion` finds it on the model too
    switches = _build_fallbacks(fusion, modes)
    if fp8.OP in fusion.get_active_ops():
        # fp8 comes first: it runs inside `lora_linear`, and the check would otherwise switch that off.
        switches.insert(0, fp8.enable_fp8(model, fusion, required=modes[fp8.OP] == "on"))
    if attention != "auto" and isinstance(model, PreTrainedModel):
        switches += _choose_attention(model, fusion, attention)
    set_model_fallbacks(model, switches)
    # `with_kwargs`: models of Diffusers are called with keyword arguments.
    fusion.hooks.append(model.register_forward_pre_hook(FirstForwardHook(check), with_kwargs=True))
    # Liger does not apply to diffusion models, so their report does not mention it.
    reported = {op: reason for op, reason in unavailable.items() if reason != _TRANSFORMERS_ONLY}
    return FuseReport(fusion, reported)


def _choose_attention(model: PreTrainedModel, fusion: FusedModelState, name: str) -> list[Fallback]:
    """Set this attention implementation on a Transformers model until `unfuse`, and return its fallbacks.

    If the model rejects it, every patch is removed and the error is raised.
    """
    try:
        choice = AttentionChoice(model, name)
    except DitLoraError:
        unfuse(model)
        raise
    fusion.hooks.append(choice)
    return choice.build_fallbacks(model)


def unfuse(model: nn.Module) -> None:
    """Restore the model's stock code in every module. A model that is not fused stays as it is."""
    fusion = get_fusion(model)
    if fusion is None:
        return
    # Raises before any change if later hooks are in the way.
    restore_modules(model)
    set_model_fallbacks(model, [])
    for hook in fusion.hooks:
        hook.remove()


def _fill_kernel_modes(requested_modes: Mapping[str, Mode]) -> dict[str, Mode]:
    """Complete the user's kernel modes to a mode (`auto`, `on` or `off`) for every op.

    Raises `DitLoraError` for an unknown op or mode.
    """
    unknown = sorted(set(requested_modes) - set(OPS))
    if unknown:
        raise DitLoraError(format_list(f"unknown kernels {', '.join(unknown)}; choose from", OPS))
    invalid_modes = [f"{op}: {mode!r}" for op, mode in requested_modes.items() if mode not in get_args(Mode)]
    if invalid_modes:
        raise DitLoraError(format_list("kernels must be auto, on or off; got", invalid_modes))
    modes = {op: requested_modes.get(op, "off" if op == fp8.OP else "auto") for op in OPS}
    if modes[fp8.OP] == "on" and modes[fp8.REQUIRED_OP] == "off":
        raise DitLoraError(f"kernels.{fp8.OP} needs {fp8.REQUIRED_OP}, which is off; set that to auto")
    return modes


def _find_off_reason(op: str, mode: Mode, model: nn.Module) -> str | None:
    """Reason why a fused op must stay off; None if it can be on.

    Raises `DitLoraError` if the mode is `on` and the machine cannot run it.
    """
    if mode == "off":
        return None
    # Liger also needs its own package, which is optional.
    if op == liger.OP:
        if not isinstance(model, PreTrainedModel):
            return _TRANSFORMERS_ONLY
        if missing := liger.find_unavailable_reason():
            if mode == "on":
                raise DitLoraError(f"kernels.{op}: {missing}; pip install 'dit-lora[liger]', or set it to auto")
            return missing
    if op == fp8.OP:
        missing = why_no_fp8()
        if missing and mode == "on":
            raise DitLoraError(f"kernels.{op}: {missing}; set it to off")
        return missing
    # Without a GPU a kernel is its reference in plain PyTorch, which is no faster: only `on` uses it.
    support = triton_support()
    if mode == "on" or op in OPS_WITHOUT_TRITON or support.mode == "gpu":
        return None
    return f"{support.reason}; with `on` it runs in plain PyTorch"


def _patch_modules(model: nn.Module, fusion: FusedModelState) -> None:
    """Patch every module of the model that has a patch for an op that is on.

    `fusion` records which modules were replaced and which were not.
    """
    # Not exclusive: an attention layer's processor is replaced even if its forward is patched too.
    for name, module in model.named_modules():
        forward = find_patch(FORWARDS, module)
        if forward is not None and fusion.op_states.get(forward.op):
            patch_forward(name, module, fusion, forward)
        processor = find_patch(PROCESSORS, get_stock_processor(module))
        if processor is not None and fusion.op_states[ATTENTION]:
            patch_processor(name, module, fusion, processor)
    if fusion.op_states.get(fp8.OP):
        fp8.record_fp8_layers(model, fusion)


def _require_requested_ops(model: nn.Module, fusion: FusedModelState, modes: Mapping[str, Mode]) -> None:
    """Restore the model and raise `DitLoraError` if an op or backend requested by name replaced nothing."""
    # With `on`, an op that applies to no module is an error.
    replaced = {op for op, _ in fusion.patched_modules}
    missing = [op for op, mode in modes.items() if mode == "on" and op not in replaced]
    if fusion.backend is not None and ATTENTION not in replaced:
        missing.append(f"{ATTENTION}: {fusion.backend}")
    if not missing:
        return
    restore_modules(model)
    reasons = [f"{op}: {name}: {reason}" for op, name, reason in fusion.skipped_modules if op in missing]
    model_class = type(model).__name__
    raise DitLoraError(
        format_list(
            f"kernels: no module of {model_class} can use {', '.join(missing)}; set them to auto or off", reasons[:20]
        )
    )


def _build_fallbacks(fusion: FusedModelState, modes: Mapping[str, Mode]) -> list[Fallback]:
    """Fallbacks that the guard can switch off.

    There is one for each op that replaced something, one for the attention backend, and one for all patches together.
    """
    switches = [
        Fallback(
            op,
            "kernel",
            partial(fusion.disable_op, op),
            partial(fusion.op_states.__setitem__, op, False),
            "PyTorch's own ops",
            required=modes[op] == "on",
            parent=KERNELS,
        )
        for op in fusion.get_active_ops()
        if op != fp8.OP
    ]
    # A backend was chosen by name: if the first check fails that is an error, and no reason to fall back.
    if fusion.backend is not None:
        switches.append(
            Fallback(
                f"attention:{fusion.backend}",
                "attention_backend",
                fusion.use_default_attention_backend,
                partial(setattr, fusion, "backend", None),
                "PyTorch's own choice",
                required=True,
                parent=KERNELS,
            )
        )
    # One fallback for everything. It is also the only one for attention processors, which belong to no op.
    if fusion.patched_modules:
        turn_off_all = partial(setattr, fusion, "stock", True)
        insisted = any(switch.required for switch in switches)
        switches.append(Fallback(KERNELS, "kernel", fusion.use_stock_code, turn_off_all, "the stock model", insisted))
    return switches
