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

from dit_lora.adapters.attach import find_tuner_layers
from dit_lora.adapters.start import has_weight_initialized_adapter
from dit_lora.guard.fallbacks import COMPILE, Fallback, disable_compile, list_model_fallbacks
from dit_lora.numerics.eval_mode import use_eval_mode
from dit_lora.numerics.memory import convert_to_out_of_memory_error
from dit_lora.numerics.tolerances import compute_rounding_tolerance
from dit_lora.numerics.transformer_blocks import repeated_blocks
from dit_lora.verify.checks import VerificationCheck, format_percent
from dit_lora.verify.reference_model import SEED, InputSpec, ReferenceModel

NUM_VALUES = 128
NOT_RECORDED = "not_recorded"
FAILURE = "wrong"
"""Key for what the recording run found wrong with the output. A result with this key always fails the check."""
_UNKNOWN_NOISE_LEVEL = (
    "an earlier version wrote the file, without the noise level of this output, and the default of train.timesteps "
    "has changed"
)
_MODEL_MODIFIED = (
    "though both hold the same weights and no kernel is on: something else was put into it, a hook or another forward"
)
_FAR, _WANTED, _MOST = 10.0, 0.5, 1000.0
"""An effect below `_FAR` tolerances is also recorded with the LoRA scale raised, at most `_MOST` times, so that it is
about `_WANTED`."""


@torch.no_grad()
def record_output(
    reference_model: ReferenceModel,
    model: nn.Module,
    input_spec: InputSpec,
    dtype: torch.dtype,
    base_record: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Record the trained model's output as JSON values, so that `compare_output` can check a loaded result against it.

    `base_record` is the output without the adapter for the same inputs, if it is known already. If the adapter's
    effect is close to rounding error, also record the output with its scale raised. If the output is not finite, a
    message is recorded instead of values. Collective if a forward pass needs all ranks.
    """
    # Fused kernels round differently, and the adapter is later loaded into the stock model.
    with disable_kernels(model):
        # First the output with the adapter, then without it: the pair tells a wrong base from a wrong adapter.
        output_record = compute_model_output_fingerprint(reference_model, model, input_spec, dtype)
        if find_tuner_layers(model):
            # At a run's end, the check of the base has just computed it with the same weights and inputs.
            if base_record is None:
                with disable_adapters(model):
                    base_record = _sample_output_values(
                        _compute_output(reference_model, model, input_spec, SEED, dtype)
                    )
            output_record["base"] = {name: base_record[name] for name in ("values", "norm")}
        if not is_finite(output_record) or not is_finite(output_record.get("base", output_record)):
            is_base_finite = "base" in output_record and is_finite(output_record["base"])
            text = "the model's output of made-up inputs is not finite"
            return {NOT_RECORDED: text + (", without the adapter it is" if is_base_finite else "")}
        # A run without an adapter has no second output, and its change needs no amplification.
        effect = compute_distance(output_record, output_record["base"]) if "base" in output_record else 1.0
        # If the effect is tiny, a missing adapter would not be noticed: record it with its scale raised, too.
        # Not for an adapter that subtracts its initial value: the rounding error of that difference would grow too.
        if effect < _FAR * compute_tolerance(output_record, model, dtype) and not has_weight_initialized_adapter(
            model
        ):
            # Three digits are enough, and the value is written to the header.
            times = float(f"{min(_MOST, _WANTED / effect) if effect else _MOST:.3g}")
            with _scale_adapters(model, times):
                louder = _sample_output_values(_compute_output(reference_model, model, input_spec, SEED, dtype))
            if is_finite(louder):
                output_record["louder"] = {"times": times, **louder}
    return output_record


@torch.no_grad()
def compute_model_output_fingerprint(
    reference_model: ReferenceModel, model: nn.Module, input_spec: InputSpec, dtype: torch.dtype
) -> dict[str, Any]:
    """The model's current output on fixed inputs as JSON values.

    They include everything that is needed to compute it again.
    """
    output = _compute_output(reference_model, model, input_spec, SEED, dtype)
    return {
        "seed": SEED,
        "dtype": _format_dtype(dtype),
        "device": next(model.parameters()).device.type,
        "blocks": len(repeated_blocks(model)),
        "inputs": dict(input_spec),
        "shape": list(output.shape),
        **_sample_output_values(output),
    }


def find_kernel_fallbacks(model: nn.Module) -> list[Fallback]:
    """Fallbacks of the kernels installed in this model. Parts of other fallbacks and torch.compile are left out."""
    return [switch for switch in list_model_fallbacks(model) if switch.parent is None and switch.name != COMPILE]


@contextmanager
def disable_kernels(model: nn.Module, except_fallback: Fallback | None = None) -> Iterator[None]:
    """Context in which the model runs its stock code or, with `except_fallback`, only this one kernel."""
    # Turning a kernel off as a whole also turns off its parts.
    disabled = find_kernel_fallbacks(model)
    if except_fallback is not None:
        # Keep the kernel that this part belongs to on, and turn off its other parts.
        parent = except_fallback.parent
        parts = [part for part in list_model_fallbacks(model) if parent and part.parent == parent]
        enabled_names = (except_fallback.name, except_fallback.parent)
        disabled = [kernel for kernel in (*disabled, *parts) if kernel.name not in enabled_names]
    with ExitStack() as stack:
        for switch in disabled:
            stack.enter_context(switch.disable_temporarily())
        yield


@torch.no_grad()
def compare_output(
    reference_model: ReferenceModel,
    model: nn.Module,
    output_record: Mapping[str, Any],
    dtype: torch.dtype,
    base_name: str,
    *,
    shares_weights: bool = False,
    digest: str | None = None,
) -> VerificationCheck:
    """Compare a loaded model's output with the recorded one.

    What the recording run could not record, or found wrong, is a failure. Files of earlier versions do not have the
    noise level of their output; if it cannot be reproduced, the digest decides whether the base is right. The
    tolerance is `tolerances.compute_rounding_tolerance`, measured in docs/verify.md.

    Args:
        reference_model: Computes the output.
        model: The loaded model with the adapter.
        output_record: The recorded output.
        dtype: The dtype that the model computes in.
        base_name: Name of the base at training time, for messages.
        shares_weights: The model shares its weights with the run that recorded the output.
        digest: Digest of the base's files at training time.
    """
    if FAILURE in output_record:
        return VerificationCheck(False, output_record[FAILURE])
    if NOT_RECORDED in output_record:
        return VerificationCheck(False, f"not recorded in training: {output_record[NOT_RECORDED]}")
    inputs, seed = output_record["inputs"], output_record["seed"]
    output = _compute_output(reference_model, model, inputs, seed, dtype)
    current_record = _sample_output_values(output)
    if not is_finite(current_record):
        return VerificationCheck(False, "the output of the model with the adapter is not finite")
    if list(output.shape) != output_record["shape"]:
        shapes = f"{list(output.shape)}, and was {output_record['shape']}"
        return VerificationCheck(False, f"the output has the shape {shapes}: the base is not {base_name}")
    limit = compute_tolerance(output_record, model, dtype)
    allowed = f"{_describe_dtypes(output_record, model, dtype)}; rounding explains up to {format_percent(limit)}"
    away = compute_distance(current_record, output_record)
    if "base" not in output_record or not find_tuner_layers(model):
        return _check_without_adapter(away, limit, allowed, base_name)
    with disable_adapters(model):
        base_output = _compute_output(reference_model, model, inputs, seed, dtype)
        base = compute_distance(_sample_output_values(base_output), output_record["base"])
    # Compare the base first: with a wrong base any adapter would look wrong.
    if not base <= limit:  # so that NaN fails too
        distance = f"{format_percent(base)} from the one recorded in training ({allowed})"
        text = f"without the adapter its output is {distance}"
        if shares_weights:
            return VerificationCheck(False, f"the run's model is not the stock model: {text}, {_MODEL_MODIFIED}")
        return _check_output_of_other_base(reference_model, inputs, base_name, digest, text)
    effects = [compute_distance(output_record, output_record["base"])]
    text = f"{format_percent(away)} from the output recorded in training ({allowed}); the adapter "
    text += f"changes this output by {format_percent(effects[0])}"
    if "louder" in output_record:
        louder = output_record["louder"]
        with _scale_adapters(model, louder["times"]):
            louder_output = _compute_output(reference_model, model, inputs, seed, dtype)
        scaled_distance = compute_distance(_sample_output_values(louder_output), louder)
        away = max(away, scaled_distance)
        effects.append(compute_distance(louder, output_record["base"]))
        text += f"; at {louder['times']:g} times its scale, by {format_percent(effects[1])}, "
        text += f"{format_percent(scaled_distance)} from what was recorded"
    if away > limit:
        return VerificationCheck(
            False,
            f"the adapter does not act as trained: the base's output is as recorded, with the adapter it is {text}; "
            "restore the file that the run wrote",
        )
    # An adapter without effect has to differ from the record by more than rounding to be noticed.
    if not any(effect > limit for effect in effects):
        text += (
            ", too little to distinguish from rounding: the base is right, the effect of the adapter is not checked"
        )
    return VerificationCheck(True, f"as trained: {text}")


def _check_output_of_other_base(
    reference_model: ReferenceModel, inputs: Any, base_name: str, digest: str | None, difference: str
) -> VerificationCheck:
    """Check result for a base whose output differs: passed only if the noise level is unknown and digests are equal.

    `difference` describes by how much the outputs differ, for the message.
    """
    has_all_inputs = reference_model.has_all_inputs(inputs)
    if not has_all_inputs and digest == reference_model.compute_digest():
        text = f"the base's files have the digest of {base_name}"
        return VerificationCheck(True, f"not compared: {_UNKNOWN_NOISE_LEVEL}; {text}")
    remedy = f"give the checkpoint that it was trained on, {base_name}, with --model"
    if not has_all_inputs:
        remedy += f". Or {_UNKNOWN_NOISE_LEVEL}, and the digest of the base's files has changed"
    return VerificationCheck(False, f"the base differs: {difference}; {remedy}")


def _check_without_adapter(
    output_distance: float, limit: float, tolerance_text: str, base_name: str
) -> VerificationCheck:
    """Check the output of a result without an adapter to turn off. The base cannot be compared separately."""
    text = f"{format_percent(output_distance)} from the output recorded in training ({tolerance_text})"
    if output_distance <= limit:
        return VerificationCheck(True, f"as trained: {text}")
    return VerificationCheck(
        False,
        f"differs: {text}: the weights, or the base that they are loaded into, are not those of {base_name}; copy the "
        "result again, or give the base with --model",
    )


def _compute_output(
    reference_model: ReferenceModel, model: nn.Module, input_spec: InputSpec, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    # Eager: the stock model that this is compared with later is not compiled.
    with use_eval_mode(model), disable_compile(model), convert_to_out_of_memory_error():
        return reference_model.compute_output(model, input_spec, seed, dtype)


@contextmanager
def _scale_adapters(model: nn.Module, factor: float) -> Iterator[None]:
    """Context in which adapters act `factor` times as strongly. Afterwards they act exactly as before."""
    # Only LoRA layers have a scale that can be raised.
    layers = [layer for layer in find_tuner_layers(model) if isinstance(layer, LoraLayer)]
    old_scalings = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: factor * value for name, value in layer.scaling.items()})
    try:
        yield
    finally:
        for layer, scaling in zip(layers, old_scalings, strict=True):
            layer.scaling.update(scaling)


def is_finite(output_record: Mapping[str, Any]) -> bool:
    """True if every value of a recorded output is finite: otherwise its norm is not."""
    return math.isfinite(output_record["norm"])


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which every adapter of the model is off."""
    layers = find_tuner_layers(model)
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


def _sample_output_values(output: torch.Tensor) -> dict[str, Any]:
    """Values of the flattened output at equal distances, and its norm; 7 digits each."""
    # Recorded in fp32, whichever dtype the model computes in.
    flat = output.detach().float().flatten()
    positions = torch.linspace(0, flat.numel() - 1, min(NUM_VALUES, flat.numel())).long()
    # fp32 has about seven digits, and the header stays small.
    values = [float(f"{value:.7g}") for value in flat[positions.to(flat.device)].tolist()]
    return {"values": values, "norm": float(f"{torch.linalg.vector_norm(flat).item():.7g}")}


def compute_distance(current_record: Mapping[str, Any], output_record: Mapping[str, Any]) -> float:
    """Relative distance of an output from its record, of the values or of the norm, whichever is larger.

    Inf if either is not finite.

    Inf if either is not finite.
    """
    if not (is_finite(current_record) and is_finite(output_record)):
        return math.inf
    # Norm of the differences relative to that of the recorded values; `or 1.0` avoids a division by zero.
    size = math.hypot(*output_record["values"]) or 1.0
    values = math.dist(current_record["values"], output_record["values"]) / size
    norm = abs(current_record["norm"] - output_record["norm"]) / (output_record["norm"] or 1.0)
    return max(values, norm)


def compute_tolerance(output_record: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> float:
    """The relative distance from the record that rounding can cause, for this model and dtype."""
    # The bound depends on the coarsest dtype, the devices and the number of blocks.
    devices = {output_record["device"], next(model.parameters()).device.type}
    dtypes = {getattr(torch, output_record["dtype"]), dtype}
    return compute_rounding_tolerance(dtypes, devices, output_record["blocks"])


def _describe_dtypes(output_record: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> str:
    recorded_text = f"{output_record['dtype']} on {output_record['device']}"
    current_text = f"{_format_dtype(dtype)} on {next(model.parameters()).device.type}"
    if recorded_text == current_text:
        return f"{recorded_text} both times"
    return f"{recorded_text} then, {current_text} now"


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
