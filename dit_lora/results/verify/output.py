"""Records a model's output for random inputs when an adapter is saved, and compares it wherever that is loaded.

The inputs come from CPU generators with one seed; no data or encoders are needed. Recorded are the output's norm and
its values at fixed positions, with and without the adapter, so that a wrong base can be told from an adapter that does
not act as trained. Fused kernels are off, when recording and when comparing.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from dit_lora.adapters.start import has_start
from dit_lora.guard.switches import COMPILE, Switch, eager, model_switches
from dit_lora.numerics.memory import one_out_of_memory_error
from dit_lora.numerics.tolerances import rounding
from dit_lora.results.verify.checks import Check, percent
from dit_lora.results.verify.reference_model import SEED, Inputs, ReferenceModel, tuner_layers
from dit_lora.training.execution.blocks import repeated_blocks
from dit_lora.training.execution.modes import evaluating

VALUES = 128
NOT_RECORDED = "not_recorded"
WRONG = "wrong"
"""Key for what the recording run found wrong with the output. A result with this key always fails the check."""
_UNKNOWN_LEVEL = (
    "its file is of an earlier version, which did not record the noise level of this output, and at today's defaults "
    "(train.timesteps) it is another"
)
_OTHER_CODE = (
    "though both hold the same weights and no kernel is on: "
    "something else was put into it, a hook or another forward"
)
_FAR, _WANTED, _MOST = 10.0, 0.5, 1000.0
"""An effect below `_FAR` tolerances is also recorded with the LoRA scale raised, at most `_MOST` times, so that it is
about `_WANTED`."""


@torch.no_grad()
def note_output(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Any]:
    """Record the model's output as JSON, for `compare_output`.

    If the adapter's effect is close to rounding error, also record the output with its scale raised. If the output is
    not finite, a message is recorded instead of values. Collective if a forward pass needs all ranks.
    """
    # Fused kernels round differently, and the adapter is later loaded into the stock model.
    with without_kernels(model):
        # First the output with the adapter, then without it: the pair tells a wrong base from a wrong adapter.
        output_record = output_now(stock, model, inputs, dtype)
        if tuner_layers(model):
            with adapters_off(model):
                output_record["base"] = _sampled(_output(stock, model, inputs, SEED, dtype))
        if not is_finite(output_record) or not is_finite(output_record.get("base", output_record)):
            is_base_finite = "base" in output_record and is_finite(output_record["base"])
            text = "the model's output of made-up inputs is not finite"
            return {NOT_RECORDED: text + (", without the adapter it is" if is_base_finite else "")}
        # A run without an adapter has no second output, and its change needs no amplification.
        effect = distance(output_record, output_record["base"]) if "base" in output_record else 1.0
        # If the effect is tiny, a missing adapter would not be noticed: record it with its scale raised, too.
        # Not for an adapter that subtracts its initial value: the rounding error of that difference would grow too.
        if effect < _FAR * tolerance(output_record, model, dtype) and not has_start(model):
            # Three digits are enough, and the value is written to the header.
            times = float(f"{min(_MOST, _WANTED / effect) if effect else _MOST:.3g}")
            with _scaled(model, times):
                louder = _sampled(_output(stock, model, inputs, SEED, dtype))
            if is_finite(louder):
                output_record["louder"] = {"times": times, **louder}
    return output_record


@torch.no_grad()
def output_now(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Any]:
    """The model's current output, with everything that is needed to compute it again; JSON."""
    output = _output(stock, model, inputs, SEED, dtype)
    return {
        "seed": SEED,
        "dtype": _name(dtype),
        "device": next(model.parameters()).device.type,
        "blocks": len(repeated_blocks(model)),
        "inputs": dict(inputs),
        "shape": list(output.shape),
        **_sampled(output),
    }


def kernels_of(model: nn.Module) -> list[Switch]:
    """Fallbacks of the kernels installed in this model, without parts of other fallbacks and without compilation."""
    return [
        switch
        for switch in model_switches(model)
        if switch.part_of is None and switch.name != COMPILE
    ]


@contextmanager
def without_kernels(model: nn.Module, but: Switch | None = None) -> Iterator[None]:
    """Context in which the model runs its stock code or, with `but`, only this one kernel."""
    # Turning a kernel off as a whole also turns off its parts.
    disabled = kernels_of(model)
    if but is not None:
        # Keep the kernel that this part belongs to on, and turn off its other parts.
        parts = [p for p in model_switches(model) if but.part_of and p.part_of == but.part_of]
        enabled_names = (but.name, but.part_of)
        disabled = [kernel for kernel in (*disabled, *parts) if kernel.name not in enabled_names]
    with ExitStack() as stack:
        for switch in disabled:
            stack.enter_context(switch.off())
        yield


@torch.no_grad()
def compare_output(
    stock: ReferenceModel,
    model: nn.Module,
    noted: Mapping[str, Any],
    dtype: torch.dtype,
    made: str,
    *,
    own: bool = False,
    digest: str | None = None,
) -> Check:
    """Compare a loaded model's output with the recorded one.

    What the recording run could not record, or found wrong, is a failure. Files of earlier versions do not have the
    noise level of their output; if it cannot be reproduced, the digest decides whether the base is right. The
    tolerance is `tolerances.rounding`, measured in docs/verify.md.

    Args:
        stock: Computes the output.
        model: The loaded model with the adapter.
        noted: The recorded output.
        dtype: The dtype that the model computes in.
        made: Name of the base at training time, for messages.
        own: The model shares its weights with the run that recorded the output.
        digest: Digest of the base's files at training time.
    """
    if WRONG in noted:
        return Check(False, noted[WRONG])
    if NOT_RECORDED in noted:
        return Check(False, f"not recorded at training's end: {noted[NOT_RECORDED]}")
    inputs, seed = noted["inputs"], noted["seed"]
    output = _output(stock, model, inputs, seed, dtype)
    current_record = _sampled(output)
    if not is_finite(current_record):
        return Check(False, "the output of the model with the adapter is not finite")
    if list(output.shape) != noted["shape"]:
        shapes = f"{list(output.shape)}, and was {noted['shape']}"
        return Check(False, f"the output has the shape {shapes}: the base is not {made}")
    limit = tolerance(noted, model, dtype)
    allowed = f"{_where(noted, model, dtype)}; up to {percent(limit)} is rounding"
    away = distance(current_record, noted)
    if "base" not in noted or not tuner_layers(model):
        return _alone(away, limit, allowed, made)
    with adapters_off(model):
        base = distance(_sampled(_output(stock, model, inputs, seed, dtype)), noted["base"])
    # Compare the base first: with a wrong base any adapter would look wrong.
    if not base <= limit:  # so that NaN fails too
        text = (
            f"without the adapter its output is {percent(base)} "
            f"from the one recorded at training's end ({allowed})"
        )
        if own:
            return Check(False, f"the run's model is not the stock model: {text}, {_OTHER_CODE}")
        if not stock.has_all_inputs(inputs) and digest == stock.digest():
            return Check(
                True,
                f"not compared: {_UNKNOWN_LEVEL}; the base's files are those of {made}, by their digest",
            )
        remedy = f"give the checkpoint that it was trained on, {made}, with --model"
        if not stock.has_all_inputs(inputs):
            remedy += f". Or {_UNKNOWN_LEVEL}, and the base's files do not have the digest of then"
        return Check(False, f"the base differs: {text}; {remedy}")
    text = f"{percent(away)} from the one recorded at training's end ({allowed}); the adapter changes this output by "
    text += percent(distance(noted, noted["base"]))
    if "louder" in noted:
        louder = noted["louder"]
        with _scaled(model, louder["times"]):
            scaled_distance = distance(_sampled(_output(stock, model, inputs, seed, dtype)), louder)
        away = max(away, scaled_distance)
        effect = percent(distance(louder, noted["base"]))
        text += f"; at {louder['times']:g} times its scale, by {effect}, and is {percent(scaled_distance)} from that"
    if away > limit:
        return Check(
            False,
            f"the adapter does not act as trained: the base's output is as recorded, with the adapter it is {text}; "
            "restore the file that the run wrote",
        )
    if not _tells(noted, limit):
        text += ", too little to tell from rounding: the base is right, and that the adapter acts is not seen"
    return Check(True, f"as trained: {text}")


def _alone(away: float, limit: float, allowed: str, made: str) -> Check:
    """The check for a result without an adapter to turn off, so that the base cannot be compared separately."""
    text = f"{percent(away)} from the one recorded at training's end ({allowed})"
    if away <= limit:
        return Check(True, f"as trained: {text}")
    return Check(
        False,
        f"differs: {text}: the weights, or the base that they are loaded into, are not those of {made}; copy the "
        "result again, or give the base with --model",
    )


def _tells(noted: Mapping[str, Any], limit: float) -> bool:
    """True if an adapter without effect would differ from the record by more than rounding."""
    return any(
        distance(record, noted["base"]) > limit for record in (noted, noted.get("louder", noted))
    )


def _output(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    """The model's output in eval mode."""
    # Eager: the stock model that this is compared with later is not compiled.
    with evaluating(model), eager(model), one_out_of_memory_error():
        return stock.output(model, inputs, seed, dtype)


@contextmanager
def _scaled(model: nn.Module, times: float) -> Iterator[None]:
    """Context in which adapters act `times` as strongly. Afterwards they act exactly as before."""
    # Only LoRA layers have a scale that can be raised.
    layers = [layer for layer in tuner_layers(model) if isinstance(layer, LoraLayer)]
    old_scalings = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: times * value for name, value in layer.scaling.items()})
    try:
        yield
    finally:
        for layer, scaling in zip(layers, old_scalings, strict=True):
            layer.scaling.update(scaling)


def is_finite(sampled: Mapping[str, Any]) -> bool:
    """True if every value of an output is finite: otherwise its norm is not."""
    return math.isfinite(sampled["norm"])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which every adapter is off."""
    layers = tuner_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # PEFT makes every adapter trainable when it is enabled: restore the trained parameters.
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def _sampled(output: torch.Tensor) -> dict[str, Any]:
    """Values of the flattened output at equal distances, and its norm; 7 digits each."""
    # Recorded in fp32, whichever dtype the model computes in.
    flat = output.detach().float().flatten()
    positions = torch.linspace(0, flat.numel() - 1, min(VALUES, flat.numel())).long()
    # fp32 has about seven digits, and the header stays small.
    values = [float(f"{value:.7g}") for value in flat[positions.to(flat.device)].tolist()]
    return {"values": values, "norm": float(f"{torch.linalg.vector_norm(flat).item():.7g}")}


def distance(now: Mapping[str, Any], noted: Mapping[str, Any]) -> float:
    """Relative distance from the record, of the values or of the norm, whichever is larger.

    Inf if either is not finite.
    """
    if not (is_finite(now) and is_finite(noted)):
        return math.inf
    # Norm of the differences relative to that of the recorded values; `or 1.0` avoids a division by zero.
    values = math.dist(now["values"], noted["values"]) / (math.hypot(*noted["values"]) or 1.0)
    norm = abs(now["norm"] - noted["norm"]) / (noted["norm"] or 1.0)
    return max(values, norm)


def tolerance(noted: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> float:
    """The relative distance from the record that rounding can cause, for this model and dtype."""
    # The bound depends on the coarsest dtype, the devices and the number of blocks.
    devices = {noted["device"], next(model.parameters()).device.type}
    return rounding({getattr(torch, noted["dtype"]), dtype}, devices, noted["blocks"])


def _where(noted: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> str:
    """Text on dtype and device, then and now."""
    recorded_text = f"{noted['dtype']} on {noted['device']}"
    current_text = f"{_name(dtype)} on {next(model.parameters()).device.type}"
    return (
        f"{recorded_text} then and now"
        if recorded_text == current_text
        else f"{recorded_text} then, {current_text} now"
    )


def _name(dtype: torch.dtype) -> str:
    """Name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")
