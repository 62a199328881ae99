"""Checks of a few seconds before a run, for causes of NaN and for adapters that would never learn.

Each check is a function that returns findings and changes nothing; the caller decides what to do about them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.errors import format_list
from dit_lora.files import read_regular_file, write_atomically
from dit_lora.guard.attention_backends import BACKENDS, AttentionCall, BackendParity, measure_backend_parity
from dit_lora.numerics.adapter_tensors import get_layer_name, is_adapter_tensor, is_zero_initialized
from dit_lora.numerics.dtensors import gather_full_tensor, get_local_tensor
from dit_lora.numerics.finite import describe_bad_values, is_finite
from dit_lora.numerics.opaque import iterate_called_modules
from dit_lora.numerics.quantized_linear import iterate_weight_values
from dit_lora.parsing import parse_json

_CACHE_VERSION = 1  # version of the checks: cached results of older versions are ignored
_ATTENTION_PREFIX = "attention backend "
FINITE_GRADIENTS = "gradients are finite"


@dataclass(frozen=True)
class CheckFinding:
    """Result of one preflight check."""

    check: str
    ok: bool
    message: str
    fatal: bool
    """True if a run must not start. A finding that is neither ok nor fatal is a warning."""


def check_trainables(model: nn.Module) -> list[CheckFinding]:
    """Check that there are trainable parameters, and that all of them are fp32 and finite.

    In fp16, AdamW's eps of 1e-8 is 0 and the first zero gradient gives 0 / 0; in bf16 small updates are lost.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        message = "no parameter is trainable; attach an adapter, or give optim.groups a base group"
        return [CheckFinding("trainables", False, message, fatal=True)]
    not_fp32 = [f"{name} is {p.dtype}" for name, p in trainable if p.dtype is not torch.float32]
    count = len(trainable)
    return [
        _make_finding(
            "trainables are fp32",
            not_fp32,
            ok_message=f"all {count} trainable tensors are fp32",
            failure_message=f"{len(not_fp32)} of {count} trainable tensors are not fp32; cast them before training",
        ),
        _check_finite("trainables are finite", trainable),
    ]


def check_base_weights(model: nn.Module) -> list[CheckFinding]:
    """Check that frozen weights, and the scales of quantized ones, are finite."""
    # Trained weights have a check of their own.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    values = ((name, values) for name, values in iterate_weight_values(model) if name not in trained)
    frozen = [(name, tensor) for name, tensor in values if tensor.is_floating_point()]
    return [_check_finite("base weights are finite", frozen)]


def check_autocast(model: nn.Module, run: Callable[[], Any], dtype: torch.dtype | None) -> list[CheckFinding]:
    """Check that every module runs under the policy's autocast during `run()`: `dtype`, or none if `dtype` is None.

    Another dtype inside the model is fatal. Autocast that is off where the policy has it on is a warning, since it may
    be an intended fp32 island. The model's own setting is not checked, since Accelerate's autocast starts inside its
    forward.
    """
    deviating: dict[str, torch.dtype | None] = {}

    def make_hook(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            if autocast is not dtype:
                deviating[name] = autocast

        return hook

    # PyTorch keeps one autocast state per device type.
    kind = next(model.parameters()).device.type
    with ExitStack() as hooks:
        for name, module in iterate_called_modules(model):
            if name:
                hooks.enter_context(module.register_forward_pre_hook(make_hook(name)))
        run()
    # Report only the outermost module of each deviating subtree.
    outermost = {
        module_name: autocast
        for module_name, autocast in deviating.items()
        if deviating.get(module_name.rpartition(".")[0], dtype) is not autocast
    }
    policy = "no autocast" if dtype is None else f"autocast to {dtype}"
    # Another dtype is fatal; autocast that is only off may be intended.
    other_dtypes = [f"{name} runs under {autocast}" for name, autocast in outermost.items() if autocast]
    without_autocast = [f"{name} runs without autocast" for name, autocast in outermost.items() if not autocast]
    return [
        _make_finding(
            "one owner of autocast",
            other_dtypes,
            ok_message=f"no module overrides the policy, {policy}",
            failure_message=f"the policy is {policy}, but these modules set another",
        ),
        _make_finding(
            "autocast is on",
            without_autocast,
            ok_message="nothing inside the model turns autocast off",
            failure_message=f"the policy is {policy}, but these modules turn it off",
            fatal=False,
        ),
    ]


def check_gradient_flow(model: nn.Module, backward: Callable[[], Any]) -> list[CheckFinding]:
    """Check that one micro-batch's `backward()` reaches every trainable parameter and no frozen one.

    Every LoRA B must get a gradient that is not all zero. So must an A whose B is not zero; with a zero B, as at the
    first step of a new adapter, A's gradient is zero too. Gradients are None before and after.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    # Set gradients to None, not to zero, so that a gradient that was never computed is detected.
    model.zero_grad(set_to_none=True)
    try:
        backward()
        gradients = [(f"gradient of {name}", p.grad) for name, p in trainable if p.grad is not None]
        leaked = [name for name, p in frozen if p.grad is not None]
        return [
            check_gradient_coverage(trainable),
            _check_finite(FINITE_GRADIENTS, gradients),
            _make_finding(
                "frozen weights get no gradient",
                leaked,
                ok_message=f"none of {len(frozen)} frozen tensors gets a gradient",
                failure_message="these are frozen, but a gradient was computed for them",
            ),
        ]
    finally:
        for _, parameter in trainable + frozen:
            parameter.grad = None


def check_gradient_coverage(trainable: Sequence[tuple[str, nn.Parameter]]) -> CheckFinding:
    """Check that every trained parameter has a gradient, and every adapter weight one that is not all zero."""
    # Weights that are zero before the first step, such as LoRA's B, by their layer.
    idle_by_layer = {get_layer_name(name): p for name, p in trainable if is_zero_initialized(name)}
    without_gradient = [
        f"{name}: {problem}" for name, p in trainable if (problem := _find_gradient_problem(name, p, idle_by_layer))
    ]
    return _make_finding(
        "gradients reach every trainable",
        without_gradient,
        ok_message=f"all {len(trainable)} trainable tensors get a gradient",
        failure_message="no gradient reaches these, so they would not be trained",
    )


def check_attention_backends(
    calls: Iterable[AttentionCall], device: torch.device
) -> tuple[list[CheckFinding], list[str]]:
    """Compare every backend with fp64 math at these calls on `device`; returns findings and backend names to disable.

    A wrong backend is a warning, since a run can do without it; a call without any correct backend is fatal. A backend
    that does not support a call is never chosen for it, and does no harm.
    """
    device_calls = [replace(call, device=device) for call in calls]
    # Run every backend at every call, forward and backward, on random inputs.
    results = [measure_backend_parity(call, name) for name in BACKENDS for call in device_calls]
    findings = [_check_backend(name, [r for r in results if r.name == name]) for name in BACKENDS]
    disabled = find_wrong_backends(findings)
    # Calls that at least one remaining backend computes correctly.
    served_calls = {result.call for result in results if result.is_accurate and result.name not in disabled}
    unserved = [str(call) for call in device_calls if call not in served_calls]
    findings.append(
        _make_finding(
            "attention",
            unserved,
            ok_message=f"all {len(device_calls)} attention calls have a correct backend",
            failure_message="no attention backend is correct for these calls",
        )
    )
    return findings, disabled


def find_wrong_backends(findings: Iterable[CheckFinding]) -> list[str]:
    """Names of the attention backends to disable, by new or cached findings of `check_attention_backends`."""
    return [
        f.check.removeprefix(_ATTENTION_PREFIX) for f in findings if f.check.startswith(_ATTENTION_PREFIX) and not f.ok
    ]


def read_cached_findings(path: Path, facts: Mapping[str, Any]) -> list[CheckFinding]:
    """Read the findings stored for these facts; an empty list if there are none."""
    return _read_cache(path).get(compute_fingerprint(facts), [])


def has_cached_findings(path: Path, facts: Mapping[str, Any]) -> bool:
    """True if check results are stored for these facts, such as versions, device and shapes."""
    return compute_fingerprint(facts) in _read_cache(path)


def check_with_cache(
    path: Path, facts: Mapping[str, Any], check: Callable[[], list[CheckFinding]], *, use_cache: bool = True
) -> list[CheckFinding]:
    """The findings of `check()`, or with `use_cache` those stored earlier for the same facts.

    The facts are all that the result depends on: versions, device, digest of the model, shapes, dtype. A fatal result
    is never stored, and an incomplete file or one of another version is ignored.
    """
    key = compute_fingerprint(facts)
    stored = _read_cache(path)
    if use_cache and key in stored:
        return stored[key]
    findings = check()
    if not any(finding.fatal for finding in findings):
        store_findings(path, facts, findings)
    return findings


def store_findings(path: Path, facts: Mapping[str, Any], findings: list[CheckFinding]) -> None:
    """Store check results in a file, under the facts that they depend on."""
    results_by_key = {**_read_cache(path), compute_fingerprint(facts): findings}
    # In files the message is called `words`.
    entries = {
        key: [{"check": f.check, "ok": f.ok, "words": f.message, "fatal": f.fatal} for f in results]
        for key, results in results_by_key.items()
    }
    write_atomically(path, json.dumps({"version": _CACHE_VERSION, "found": entries}, indent=1))


def compute_fingerprint(facts: Mapping[str, Any]) -> str:
    """SHA-256 of the facts that a check result depends on, independent of their order.

    Dtypes, devices and paths are represented by their names.
    """
    text = json.dumps(dict(facts), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, list[CheckFinding]]:
    try:
        # The cache is optional: if the file cannot be read, the checks run again.
        stored = parse_json(read_regular_file(path))
        if stored["version"] != _CACHE_VERSION:
            return {}
        findings_by_key = stored["found"]
        return {
            key: [CheckFinding(f["check"], f["ok"], f["words"], f["fatal"]) for f in findings]
            for key, findings in findings_by_key.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no file, or one torn or written by another version


def _make_finding(
    check: str, offenders: Sequence[str], *, ok_message: str, failure_message: str, fatal: bool = True
) -> CheckFinding:
    if not offenders:
        return CheckFinding(check, True, ok_message, fatal=False)
    return CheckFinding(check, False, format_list(failure_message, offenders), fatal=fatal)


def _check_finite(check: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> CheckFinding:
    parts = [(name, get_local_tensor(tensor.detach())) for name, tensor in tensors]
    bad = [description for n, t in parts if not is_finite(t) and (description := describe_bad_values(n, t))]
    return _make_finding(
        check,
        bad,
        ok_message=f"all {len(tensors)} tensors are finite",
        failure_message=f"{len(bad)} of {len(tensors)} tensors are not finite",
    )


def _find_gradient_problem(
    name: str, parameter: nn.Parameter, idle_by_layer: Mapping[str, nn.Parameter]
) -> str | None:
    if parameter.grad is None:
        return "no gradient"
    if not is_adapter_tensor(name):
        return None
    # A weight that is multiplied by a zero factor gets no gradient yet. Every rank makes the same gathers.
    factor = None if is_zero_initialized(name) else idle_by_layer.get(get_layer_name(name))
    if gather_full_tensor(parameter.grad).any() or (
        factor is not None and not gather_full_tensor(factor.detach()).any()
    ):
        return None
    return "a gradient that is all zero"


def _check_backend(name: str, results: Sequence[BackendParity]) -> CheckFinding:
    # A call that the backend does not support proves nothing about it.
    supported = [result for result in results if result.is_supported]
    failures = [str(result) for result in supported if not result.is_accurate]
    if not supported:
        reason = results[0].reason if results else "no attention call was recorded"
        return CheckFinding(_ATTENTION_PREFIX + name, True, f"not used: {reason}", fatal=False)
    # A backend that raised an error has no measured errors, hence the default.
    worst = max(max(result.errors.values(), default=0.0) for result in supported)
    return _make_finding(
        _ATTENTION_PREFIX + name,
        failures,
        ok_message=f"correct for {len(supported)} of {len(results)} calls, errors up to {worst:.1e}",
        failure_message=f"wrong for {len(failures)} of {len(supported)} calls, so it must be disabled",
        fatal=False,
    )
