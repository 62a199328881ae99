"""`fuse` and `unfuse`: fused kernels in a model that stays what it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

from dit_lora.errors import DitLoraError, listed
from dit_lora.fuse import fp8, liger
from dit_lora.fuse.attention import require_backend
from dit_lora.fuse.first_forward import FirstForwards
from dit_lora.fuse.lora import has_lora
from dit_lora.fuse.patches import (
    ATTENTION,
    KERNELS,
    OPS,
    Fusion,
    fusion_of,
    mark,
    matches,
    patch_forward,
    patch_processor,
    refuse_projection_fusing,
    restore,
    stock_processor,
)
from dit_lora.fuse.registry import FORWARDS, PROCESSORS, WITHOUT_TRITON
from dit_lora.fuse.transformers_attention import AttentionChoice, require_implementation
from dit_lora.guard.switches import Switch, set_model_switches
from dit_lora_kernels import triton_support
from dit_lora_kernels.fp8 import why_unavailable as why_no_fp8

Mode = Literal["auto", "on", "off"]
_OF_OTHERS = "it is for models of Transformers"


@dataclass(frozen=True)
class FuseReport:
    """An account of what was replaced and what was not, and why; as text, one line each."""

    fusion: Fusion
    unavailable: Mapping[str, str]
    """Ops that `auto` leaves off on this machine, with the reason."""

    @property
    def ops(self) -> list[str]:
        """Return the ops that are on and replaced something."""
        return self.fusion.used()

    def __str__(self) -> str:
        lines = self.fusion.lines()
        # One line for all ops with one reason: without a GPU that is nearly all of them.
        reasons: dict[str, list[str]] = {}
        for op, reason in self.unavailable.items():
            reasons.setdefault(reason, []).append(op)
        lines += [f"{', '.join(ops)}: off: {reason}" for reason, ops in reasons.items()]
        return "\n".join(f"kernels: {line}" for line in lines) or "kernels: nothing to replace"


def fuse(
    model: nn.Module,
    ops: Mapping[str, Mode] | None = None,
    *,
    attention: str = "auto",
    check: bool = True,
) -> FuseReport:
    """Use fused kernels in this model's blocks and adapters; `unfuse` undoes it.

    `ops` gives `auto`, `on` or `off` by name; `auto` where it names none, but `off` for `fp8`. `auto`: where it applies, the machine
    can run it, and parity holds. `on`: also without a GPU, by its reference; raises if parity does not hold
    or nothing in the model takes it. `attention` is one of Diffusers' backends that train or, for a model of
    Transformers, one of its implementations; `auto` is PyTorch's own choice. With `check`, the first training forward
    of each shape is compared with the stock model, values and gradients, before it counts.

    Call it after adapters are attached and before hooks, offload, DDP and torch.compile. Raises `DitLoraError` on
    names that it does not know, and on a model whose q, k and v projections Diffusers has fused under LoRA.
    """
    modes = _modes(ops or {})
    if fusion_of(model) is not None:
        unfuse(model)
    # All that can be refused is refused before the first module is patched.
    backend = None
    if attention != "auto" and isinstance(model, PreTrainedModel):
        require_implementation(model, attention)
    elif attention != "auto":
        backend = require_backend(attention)
    unavailable = _unavailable(model, modes)
    on = {op: mode != "off" and op not in unavailable for op, mode in modes.items()}
    # Fused processors come with any op: they have one input for q, k and v, which adapters share.
    fusion = Fusion({**on, ATTENTION: any(on.values()) or backend is not None}, backend)
    refuse_projection_fusing(model, has_lora)
    _patch(model, fusion)
    _require_asked(model, fusion, modes)
    mark(model, fusion)  # patched or not, so that `fusion_of` finds it on the model too
    switches = _switches(fusion, modes)
    if fp8.OP in fusion.used():
        # First: it is inside of another op, which would take the blame.
        switches.insert(0, fp8.start(model, fusion, insisted=modes[fp8.OP] == "on"))
    if attention != "auto" and isinstance(model, PreTrainedModel):
        switches += _choose_attention(model, fusion, attention)
    set_model_switches(model, switches)
    fusion.hooks.append(model.register_forward_pre_hook(FirstForwards(check), with_kwargs=True))
    reported = {op: reason for op, reason in unavailable.items() if reason != _OF_OTHERS}
    return FuseReport(fusion, reported)


def _unavailable(model: nn.Module, modes: Mapping[str, Mode]) -> dict[str, str]:
    """Return the ops that `auto` leaves off for this model on this machine, with the reason."""
    reasons = {op: _why_off(op, mode, model) for op, mode in modes.items()}
    return {op: reason for op, reason in reasons.items() if reason is not None}


def _choose_attention(model: PreTrainedModel, fusion: Fusion, name: str) -> list[Switch]:
    """Give the model this implementation until it is unfused, and return its switches; undo all if it takes none."""
    try:
        choice = AttentionChoice(model, name)
    except DitLoraError:
        unfuse(model)
        raise
    fusion.hooks.append(choice)
    return choice.switches(model)


def unfuse(model: nn.Module) -> None:
    """Give the model its own code back, everywhere; nothing happens to a model that is not fused."""
    fusion = fusion_of(model)
    if fusion is None:
        return
    restore(model)
    set_model_switches(model, [])
    for hook in fusion.hooks:
        hook.remove()


def _modes(asked: Mapping[str, Mode]) -> dict[str, Mode]:
    """Return a mode for every op; raise `DitLoraError` for a name or a mode that there is not."""
    unknown = sorted(set(asked) - set(OPS))
    if unknown:
        raise DitLoraError(listed(f"no kernel is called {', '.join(unknown)}; there are", OPS))
    wrong = [f"{op}: {mode!r}" for op, mode in asked.items() if mode not in get_args(Mode)]
    if wrong:
        raise DitLoraError(listed("give auto, on or off for each kernel; got", wrong))
    modes = {op: asked.get(op, "off" if op == fp8.OP else "auto") for op in OPS}
    if modes[fp8.OP] == "on" and modes[fp8.NEEDS] == "off":
        raise DitLoraError(
            f"kernels.{fp8.OP}: it computes the products of {fp8.NEEDS}, which is off; set that to auto"
        )
    return modes


def _why_off(op: str, mode: Mode, model: nn.Module) -> str | None:
    """Return why `auto` leaves this op off, None if it does not; raise where `on` asks for what is not there."""
    if mode == "off":
        return None
    if op == liger.OP:
        if not isinstance(model, PreTrainedModel):
            return _OF_OTHERS
        if missing := liger.why_unavailable():
            if mode == "on":
                raise DitLoraError(
                    f"kernels.{op}: {missing}; pip install 'dit-lora[liger]', or set it to auto"
                )
            return missing
    if op == fp8.OP:
        missing = why_no_fp8()
        if missing and mode == "on":
            raise DitLoraError(f"kernels.{op}: {missing}; set it to off")
        return missing
    # Without a GPU a kernel is its reference in plain PyTorch, which gains nothing: only who insists gets it.
    support = triton_support()
    if mode == "on" or op in WITHOUT_TRITON or support.mode == "gpu":
        return None
    return f"{support.reason}; `on` runs its reference"


def _patch(model: nn.Module, fusion: Fusion) -> None:
    """Patch every module that there is a patch for, by what is on; note in `fusion` what was done and what was not."""
    # A module may be both: an attention layer's processor is replaced whatever becomes of the layer's forward.
    for name, module in model.named_modules():
        forward = matches(FORWARDS, module)
        if forward is not None and fusion.on.get(forward.op):
            patch_forward(name, module, fusion, forward)
        processor = matches(PROCESSORS, stock_processor(module))
        if processor is not None and fusion.on[ATTENTION]:
            patch_processor(name, module, fusion, processor)
    if fusion.on.get(fp8.OP):
        fp8.note(model, fusion)


def _require_asked(model: nn.Module, fusion: Fusion, modes: Mapping[str, Mode]) -> None:
    """Restore the model and raise `DitLoraError` if something asked for by name replaced nothing."""
    replaced = {op for op, _ in fusion.replaced}
    missing = [op for op, mode in modes.items() if mode == "on" and op not in replaced]
    if fusion.backend is not None and ATTENTION not in replaced:
        missing.append(f"{ATTENTION}: {fusion.backend}")
    if not missing:
        return
    restore(model)
    reasons = [f"{op}: {name}: {reason}" for op, name, reason in fusion.kept if op in missing]
    model_class = type(model).__name__
    raise DitLoraError(
        listed(f"kernels: {model_class} has nothing that takes {', '.join(missing)}", reasons[:20])
    )


def _switches(fusion: Fusion, modes: Mapping[str, Mode]) -> list[Switch]:
    """Return a switch for each op that replaced something, one for the backend, one for everything together."""
    switches = [
        Switch(
            op,
            "kernel",
            partial(fusion.without, op),
            partial(fusion.on.__setitem__, op, False),
            "PyTorch's own ops",
            insisted=modes[op] == "on",
            part_of=KERNELS,
        )
        for op in fusion.used()
        if op != fp8.OP
    ]
    # A backend was chosen by name: where it is wrong from the start that is an error, and no reason to fall back.
    if fusion.backend is not None:
        switches.append(
            Switch(
                f"attention:{fusion.backend}",
                "attention_backend",
                fusion.any_backend,
                partial(setattr, fusion, "backend", None),
                "PyTorch's own choice",
                insisted=True,
                part_of=KERNELS,
            )
        )
    # Everything together, which is also the only switch of attention processors: they belong to no op.
    if fusion.replaced:
        stock = partial(setattr, fusion, "stock", True)
        insisted = any(switch.insisted for switch in switches)
        switches.append(
            Switch(KERNELS, "kernel", fusion.all_stock, stock, "the stock model", insisted)
        )
    return switches
