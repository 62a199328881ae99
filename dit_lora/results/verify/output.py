"""Notes a model's output of made-up inputs when an adapter is saved, and compares it wherever that is loaded.

Inputs come from generators on the CPU by one seed, and need neither data nor encoders. Noted are the output's norm
and values at fixed positions, with the adapter and without it: so a wrong base is told apart from an adapter that
does not act as it was trained. No fused kernel has a part in them, as none has where they are compared.
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
"""The key of what the run that noted an output found wrong with it: then no result is sound that has this output."""
_UNKNOWN_LEVEL = (
    "its file is of an earlier version, which did not record the noise level of this output, and at today's defaults "
    "(train.timesteps) it is another"
)
_OTHER_CODE = (
    "though both hold the same weights and no kernel is on: "
    "something else was put into it, a hook or another forward"
)
_FAR, _WANTED, _MOST = 10.0, 0.5, 1000.0
"""An effect below `_FAR` tolerances is also noted at a scale where it is about `_WANTED`, at most `_MOST` times."""


@torch.no_grad()
def note_output(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the model's output as JSON, for `compare_output`.

    Where the adapter's effect is not far beyond rounding, also the output at a multiple of its scale. Collective
    where a forward pass needs all ranks. If it is not finite, that is noted in place of values.
    """
    with without_kernels(model):
        noted = output_now(stock, model, inputs, dtype)
        if tuner_layers(model):
            with adapters_off(model):
                noted["base"] = _sampled(_output(stock, model, inputs, SEED, dtype))
        if not is_finite(noted) or not is_finite(noted.get("base", noted)):
            without = "base" in noted and is_finite(noted["base"])
            why = "the model's output of made-up inputs is not finite"
            return {NOT_RECORDED: why + (", without the adapter it is" if without else "")}
        effect = distance(noted, noted["base"]) if "base" in noted else 1.0
        # A faint adapter could be missing and nothing would show: it is noted at a louder scale too.
        # One that takes a start back is a difference of large products, whose rounding would be as loud.
        if effect < _FAR * tolerance(noted, model, dtype) and not has_start(model):
            times = float(f"{min(_MOST, _WANTED / effect) if effect else _MOST:.3g}")
            with _scaled(model, times):
                louder = _sampled(_output(stock, model, inputs, SEED, dtype))
            if is_finite(louder):
                noted["louder"] = {"times": times, **louder}
    return noted


@torch.no_grad()
def output_now(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the model's output as it is, with all that computing it again takes; JSON."""
    whole = _output(stock, model, inputs, SEED, dtype)
    return {
        "seed": SEED,
        "dtype": _name(dtype),
        "device": next(model.parameters()).device.type,
        "blocks": len(repeated_blocks(model)),
        "inputs": dict(inputs),
        "shape": list(whole.shape),
        **_sampled(whole),
    }


def kernels_of(model: nn.Module) -> list[Switch]:
    """Return the switches put into this model in place of its own code, without parts of a whole or compiled code."""
    return [one for one in model_switches(model) if one.part_of is None and one.name != COMPILE]


@contextmanager
def without_kernels(model: nn.Module, but: Switch | None = None) -> Iterator[None]:
    """Let the model compute by its own code within; or, with `but`, by that one part of its kernels alone."""
    off = kernels_of(model)
    if but is not None:
        parts = [one for one in model_switches(model) if but.part_of and one.part_of == but.part_of]
        on = (but.name, but.part_of)
        off = [one for one in (*off, *parts) if one.name not in on]
    with ExitStack() as stack:
        for switch in off:
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
    """Compare a loaded model's output with the one that was noted; `made` names the base of then.

    `own`: the model holds the very weights of the run that noted it. What that run could not record, or found wrong,
    is a failure. `digest` is that of the base's files then. Files of earlier versions do not say at which noise level
    their output was noted; if it cannot be found again, the digest tells whether the base is right. The tolerance is
    `tolerances.rounding`, measured in docs/verify.md.
    """
    if WRONG in noted:
        return Check(False, noted[WRONG])
    if NOT_RECORDED in noted:
        return Check(False, f"not recorded at training's end: {noted[NOT_RECORDED]}")
    inputs, seed = noted["inputs"], noted["seed"]
    whole = _output(stock, model, inputs, seed, dtype)
    now = _sampled(whole)
    if not is_finite(now):
        return Check(False, "the output of the model with the adapter is not finite")
    if list(whole.shape) != noted["shape"]:
        shapes = f"{list(whole.shape)}, and was {noted['shape']}"
        return Check(False, f"the output has the shape {shapes}: the base is not {made}")
    limit = tolerance(noted, model, dtype)
    allowed = f"{_where(noted, model, dtype)}; up to {percent(limit)} is rounding"
    away = distance(now, noted)
    if "base" not in noted or not tuner_layers(model):
        return _alone(away, limit, allowed, made)
    with adapters_off(model):
        base = distance(_sampled(_output(stock, model, inputs, seed, dtype)), noted["base"])
    # The base is judged first: a wrong one would make any adapter look wrong.
    if not base <= limit:  # so that NaN fails too
        words = (
            f"without the adapter its output is {percent(base)} "
            f"from the one recorded at training's end ({allowed})"
        )
        if own:
            return Check(False, f"the run's model is not the stock model: {words}, {_OTHER_CODE}")
        if not stock.has_all_inputs(inputs) and digest == stock.digest():
            return Check(
                True,
                f"not compared: {_UNKNOWN_LEVEL}; the base's files are those of {made}, by their digest",
            )
        remedy = f"give the checkpoint that it was trained on, {made}, with --model"
        if not stock.has_all_inputs(inputs):
            remedy += f". Or {_UNKNOWN_LEVEL}, and the base's files do not have the digest of then"
        return Check(False, f"the base differs: {words}; {remedy}")
    words = f"{percent(away)} from the one recorded at training's end ({allowed}); the adapter changes this output by "
    words += percent(distance(noted, noted["base"]))
    if "louder" in noted:
        louder = noted["louder"]
        with _scaled(model, louder["times"]):
            there = distance(_sampled(_output(stock, model, inputs, seed, dtype)), louder)
        away = max(away, there)
        effect = percent(distance(louder, noted["base"]))
        words += f"; at {louder['times']:g} times its scale, by {effect}, and is {percent(there)} from that"
    if away > limit:
        return Check(
            False,
            f"the adapter does not act as trained: the base's output is as recorded, with the adapter it is {words}; "
            "restore the file that the run wrote",
        )
    if not _tells(noted, limit):
        words += ", too little to tell from rounding: the base is right, and that the adapter acts is not seen"
    return Check(True, f"as trained: {words}")


def _alone(away: float, limit: float, allowed: str, made: str) -> Check:
    """Judge a result without an adapter, whose base is in no model that could be asked."""
    words = f"{percent(away)} from the one recorded at training's end ({allowed})"
    if away <= limit:
        return Check(True, f"as trained: {words}")
    return Check(
        False,
        f"differs: {words}: the weights, or the base that they are loaded into, are not those of {made}; copy the "
        "result again, or give the base with --model",
    )


def _tells(noted: Mapping[str, Any], limit: float) -> bool:
    """Return true if an adapter that does not act would be further from what was noted than rounding can be."""
    return any(distance(one, noted["base"]) > limit for one in (noted, noted.get("louder", noted)))


def _output(
    stock: ReferenceModel, model: nn.Module, inputs: Inputs, seed: int, dtype: torch.dtype
) -> torch.Tensor:
    # Eager: what is compared later is the stock model, which is not compiled.
    with evaluating(model), eager(model), one_out_of_memory_error():
        return stock.output(model, inputs, seed, dtype)


@contextmanager
def _scaled(model: nn.Module, times: float) -> Iterator[None]:
    """Let adapters act that many times as strongly within; afterwards they act exactly as before."""
    layers = [layer for layer in tuner_layers(model) if isinstance(layer, LoraLayer)]
    before = [dict(layer.scaling) for layer in layers]
    for layer in layers:
        layer.scaling.update({name: times * one for name, one in layer.scaling.items()})
    try:
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update(scaling)


def is_finite(sampled: Mapping[str, Any]) -> bool:
    """Return true if all of an output is finite: its norm is not where a value is not."""
    return math.isfinite(sampled["norm"])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch every adapter off within."""
    layers = tuner_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        # PEFT makes every adapter that it enables trainable, and those that it disables frozen.
        model.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)


def _sampled(output: torch.Tensor) -> dict[str, Any]:
    """Return values at equal distances over the flattened output, and its norm; 7 digits each."""
    flat = output.detach().float().flatten()
    places = torch.linspace(0, flat.numel() - 1, min(VALUES, flat.numel())).long()
    # Seven digits are what fp32 holds, and the header stays small.
    values = [float(f"{value:.7g}") for value in flat[places.to(flat.device)].tolist()]
    return {"values": values, "norm": float(f"{torch.linalg.vector_norm(flat).item():.7g}")}


def distance(now: Mapping[str, Any], noted: Mapping[str, Any]) -> float:
    """Return the distance from what was noted, relative to it; infinite if either is not finite.

    It is that of the values, or of the norm, whichever is larger.
    """
    if not (is_finite(now) and is_finite(noted)):
        return math.inf
    values = math.dist(now["values"], noted["values"]) / (math.hypot(*noted["values"]) or 1.0)
    norm = abs(now["norm"] - noted["norm"]) / (noted["norm"] or 1.0)
    return max(values, norm)


def tolerance(noted: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> float:
    """Return how far this model's output, in this dtype, may be from the one noted by rounding alone."""
    devices = {noted["device"], next(model.parameters()).device.type}
    return rounding({getattr(torch, noted["dtype"]), dtype}, devices, noted["blocks"])


def _where(noted: Mapping[str, Any], model: nn.Module, dtype: torch.dtype) -> str:
    then = f"{noted['dtype']} on {noted['device']}"
    now = f"{_name(dtype)} on {next(model.parameters()).device.type}"
    return f"{then} then and now" if then == now else f"{then} then, {now} now"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
