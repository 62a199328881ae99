"""Per-module statistics of a step: gradient norms, update-to-weight ratios, and the distance of outputs from Inf.

Values stay on the device until `collect_module_statistics` makes the only transfer, so that a measured step does not
wait for the device in between. All of a process' modules are on one device. A LoRA layer counts as one module, under
the name of the layer that it wraps. With FSDP2, norms are of whole parameters: one all-reduce per kind. Largest
magnitudes are of this rank's samples.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.numerics.dtensors import combine_shard_norms, get_local_tensor
from dit_lora.numerics.finite import abs_max, can_hold_nonfinite, compute_headroom

# Names of PEFT's submodules inside a wrapped layer (peft/tuners/lora/layer.py).
_LORA_SUBMODULE = re.compile(r"(^|\.)(lora_\w+|base_layer)(\.|$)")


class _StatisticKey(NamedTuple):
    kind: Literal["grad", "weight", "change", "peak"]
    module: str
    part: str | torch.dtype
    """The parameter's name; for a peak, the dtype of the output."""


class Monitor:
    """Collects training statistics of every `interval_steps`-th step; 0 means never.

    Create it after the model is prepared. In a step that is `is_due`, run the forward passes inside `record_outputs`,
    call `record_gradient_norms` after backward and before clipping, `before_update` and `after_update` around the
    optimizer's step, then `collect_module_statistics`.
    """

    def __init__(self, model: nn.Module, *, interval_steps: int) -> None:
        self._interval_steps = interval_steps
        self._modules = _select_modules(model)
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._values: dict[_StatisticKey, torch.Tensor] = {}
        self._weights_before: list[torch.Tensor] = []
        self._hidden_infinities: list[str] = []

    def is_due(self, step: int) -> bool:
        return self._interval_steps > 0 and step % self._interval_steps == 0

    @contextmanager
    def record_outputs(self) -> Iterator[None]:
        """Record the largest magnitude of the modules' outputs inside the context; drops earlier records.

        Outputs are unchanged bit for bit. Gradient checkpointing computes an output twice, which does not change a
        maximum.
        """
        self._values.clear()
        self._hidden_infinities = []
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                hooks.enter_context(module.register_forward_hook(self._make_peak_hook(name)))
            yield

    def record_gradient_norms(self) -> None:
        """Record the norms of the current gradients, before clipping."""
        self._record_norms("grad", {n: p.grad for n, p in self._trainable.items() if p.grad is not None})

    def before_update(self) -> None:
        """Copy the trainable weights before the optimizer's step.

        The copy takes their memory once more until `after_update`.
        """
        self._weights_before = [get_local_tensor(p.detach()).clone() for p in self._trainable.values()]

    def after_update(self) -> None:
        """Record the norms of the weights and of the optimizer's changes to them, after its step."""
        weights = {name: get_local_tensor(p.detach()) for name, p in self._trainable.items()}
        # Weights after the step minus the copies from before it, in one call for all parameters.
        changes = torch._foreach_sub(list(weights.values()), self._weights_before)
        self._record_norms("weight", weights)
        self._record_norms("change", dict(zip(self._trainable, changes, strict=True)))
        self._weights_before = []

    def collect_module_statistics(self) -> dict[str, dict[str, float]]:
        """Compute the step's `grad_norm`, `update_ratio`, `abs_max` and `headroom` per module, where known, and reset.

        Rounded to four significant digits. A module whose outputs were all zero has no headroom.
        """
        # The only transfer from the device; all values before it are scalars there.
        stacked = torch.stack(list(self._values.values())).tolist() if self._values else []
        values: defaultdict[str, dict[_StatisticKey, float]] = defaultdict(dict)
        for key, value in zip(self._values, stacked, strict=True):
            values[key.module][key] = value
        self._values.clear()
        statistics = {module: _compute_module_statistics(module_values) for module, module_values in values.items()}
        peaks = {module: numbers.get("abs_max", 0.0) for module, numbers in statistics.items()}
        self._hidden_infinities = [module for module, peak in peaks.items() if not math.isfinite(peak)]
        return statistics

    def find_hidden_infinities(self) -> list[str]:
        """Names of modules with Inf or NaN in their outputs, in order of execution.

        Call it after `collect_module_statistics`. If the loss was finite, something after the first of them hides it:
        a clamp, a mask, `nan_to_num`.
        """
        return list(self._hidden_infinities)

    def _record_norms(self, kind: Literal["grad", "weight", "change"], tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            return
        parts = [get_local_tensor(tensor.detach()) for tensor in tensors.values()]
        # One kernel launch for all parameters: hundreds of small launches would keep a GPU waiting.
        norms = list(torch._foreach_norm(parts, 2, dtype=torch.float32))
        if any(isinstance(self._trainable[name], DTensor) for name in tensors):
            norms = list(combine_shard_norms(torch.stack(norms)))
        for name, norm in zip(tensors, norms, strict=True):
            # `blocks.0.to_q.lora_A.default.weight` belongs to `blocks.0.to_q`.
            inside = _LORA_SUBMODULE.search(name)
            module = name[: inside.start()] if inside else name.rpartition(".")[0]
            self._values[_StatisticKey(kind, module, name)] = norm

    def _make_peak_hook(self, module: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            # Outputs in dicts or objects are not measured.
            tensors = [get_local_tensor(item.detach()) for item in outputs if isinstance(item, torch.Tensor)]
            for tensor in filter(can_hold_nonfinite, tensors):
                # A module's outputs may have several dtypes, each with its own headroom.
                key = _StatisticKey("peak", module, tensor.dtype)
                peak = abs_max(tensor)
                # torch.maximum keeps a NaN.
                self._values[key] = torch.maximum(self._values.get(key, peak), peak)

        return hook


def _compute_module_statistics(values: dict[_StatisticKey, float]) -> dict[str, float]:
    norms: dict[str, list[float]] = defaultdict(list)
    peaks: dict[torch.dtype, float] = {}
    for key, value in values.items():
        if isinstance(key.part, torch.dtype):
            peaks[key.part] = value
        else:
            norms[key.kind].append(value)
    statistics = {}
    # The norm over several parameters is the root of their summed squares.
    if "grad" in norms:
        statistics["grad_norm"] = math.hypot(*norms["grad"])
    if "change" in norms:
        change, weight = math.hypot(*norms["change"]), math.hypot(*norms["weight"])
        # Without a change it is 0, also if all weights are zero.
        ratio = change / weight if weight else math.inf
        statistics["update_ratio"] = ratio if change else 0.0
    if peaks:
        # NaN cannot be ordered, so sort it above all numbers.
        statistics["abs_max"] = max(peaks.values(), key=lambda peak: (math.isnan(peak), peak))
        # Headroom is infinite where all outputs were zero; that is not reported.
        headrooms = [compute_headroom(peak, dtype) for dtype, peak in peaks.items()]
        if all(map(math.isfinite, headrooms)):
            statistics["headroom"] = min(headrooms)
    return {name: float(f"{value:.4g}") for name, value in statistics.items()}


def _select_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Select the modules to measure: leaf modules, and the direct children of module lists, which are the blocks.

    LoRA layers count as leaves.
    """
    # PEFT's submodules do not count by themselves: the wrapped layer stands for them.
    outer_modules = {n: m for n, m in model.named_modules() if not _LORA_SUBMODULE.search(n)}
    # A module that is nobody's parent is a leaf.
    parents = {name.rpartition(".")[0] for name in outer_modules if name}
    # The children of a ModuleList are the model's blocks.
    lists = {name for name, module in outer_modules.items() if isinstance(module, nn.ModuleList)}
    return {
        name: module
        for name, module in outer_modules.items()
        if name not in parents or (name and name.rpartition(".")[0] in lists)
    }
