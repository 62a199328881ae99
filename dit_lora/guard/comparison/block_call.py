"""Repeat one call of a block on the same inputs, in its dtype or in fp32, and compute its outputs and gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dit_lora.guard.comparison.parity_values import (
    Values,
    collect_named_gradients,
    map_output_names_to_tensors,
    record_outputs,
)
from dit_lora.guard.replay import get_cuda_devices
from dit_lora.numerics.finite import HALF_DTYPES
from dit_lora.numerics.opaque import COUNTS_ONLY, iterate_called_modules

_COLLECTOR_VARIABLE = "output_collector"


class BlockCall:
    """One call of a transformer block that can be repeated, to compare its values with and without a kernel.

    `grad_flags` says which of its floating-point inputs require a gradient; all of them, if its length does not match.
    With `outer_model`, the model, the outputs of the block's submodules are compared too. With `adds_second_row`,
    inputs of one row get a second row.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        grad_flags: tuple[bool, ...],
        *,
        outer_model: nn.Module | None = None,
        adds_second_row: bool = False,
    ) -> None:
        self.name, self.module, self.has_second_row = name, module, adds_second_row
        self._outer_model = outer_model
        # The arguments are kept flat, so that each run can copy and convert their tensors.
        self._leaves, self._spec = tree_flatten((args, kwargs))
        for index, leaf in enumerate(self._leaves):
            if adds_second_row and isinstance(leaf, torch.Tensor) and leaf.ndim >= 2 and len(leaf) == 1:
                # Flip along the last dimension, which keeps the magnitude and changes the values. Integers and masks
                # repeat the first row. (1, ...) -> (2, ...)
                second_row = leaf.flip(-1) if leaf.is_floating_point() else leaf
                self._leaves[index] = torch.cat([leaf, second_row])
        float_inputs = list_float_tensors(self._leaves)
        self._grad_flags = grad_flags if len(grad_flags) == len(float_inputs) else (True,) * len(float_inputs)
        tensors = [*module.parameters(), *float_inputs]
        half_dtypes = {x.dtype for x in tensors if x.dtype in HALF_DTYPES}
        self.is_half = bool(half_dtypes)
        # If a block mixes half-precision dtypes, the coarser one decides the tolerance.
        self.dtype = torch.bfloat16 if torch.bfloat16 in half_dtypes else torch.float16
        self.device = next((x.device for x in tensors), torch.device("cpu"))
        self.inputs = [x.detach() for x in float_inputs]

    def compute_values(self, *, uses_fp32: bool) -> Values:
        """Compute a block's outputs and the gradients of a randomly weighted sum of them, with the current kernels.

        With `uses_fp32`, half-precision inputs are converted to fp32.
        """
        # Fresh leaves for each run, so that neither gradients nor in-place writes carry over.
        leaves, learning = self._copy_tensor_arguments(uses_fp32=uses_fp32)
        args, kwargs = tree_unflatten(leaves, self._spec)
        inner_values: Values = {}
        recorder: AbstractContextManager[None] = nullcontext()
        if self._outer_model is not None:
            # The block itself is compared by its returned outputs.
            inner_names = [name for name, _ in iterate_called_modules(self.module) if name]
            full_names = [f"{self.name}.{name}" if self.name else name for name in inner_names]
            recorder = record_outputs(self._outer_model, full_names, inner_values)
        # A block may draw random numbers; the run's generators must not advance.
        with (
            torch.enable_grad(),
            torch.random.fork_rng(get_cuda_devices(self.module)),
            _disable_tf32(),
            # Replaces the hooks of a checkpoint around the block.
            saved_tensors_hooks(_save_tensor_unchanged, lambda x: x),
            recorder,
        ):
            output = _call_without_output_capture(lambda: self.module(*args, **kwargs))
            outputs = map_output_names_to_tensors(self.name, output)
            grads = self._compute_gradients(outputs, learning)
        return {**inner_values, **{n: x.detach() for n, x in outputs.items()}, **grads}

    def _copy_tensor_arguments(self, *, uses_fp32: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
        # One flag for each floating-point leaf, in the order of the flattened arguments.
        flags, leaves, learning = iter(self._grad_flags), [], {}
        for index, leaf in enumerate(self._leaves):
            if not is_float_tensor(leaf):
                # Some blocks receive the dtype to compute in as an argument.
                is_half = uses_fp32 and isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES
                leaves.append(torch.float32 if is_half else leaf)
                continue
            dtype = torch.float32 if uses_fp32 and leaf.dtype in HALF_DTYPES else leaf.dtype
            copied = leaf.detach().to(dtype, copy=True).requires_grad_(next(flags))
            leaves.append(copied)
            if copied.requires_grad:
                learning[f"{self.name}'s input {index}"] = copied
        return leaves, learning

    def _compute_gradients(self, outputs: Values, inputs: dict[str, torch.Tensor]) -> Values:
        # Differentiate from the outputs to the trained parameters and the inputs that require a gradient.
        roots = [x for x in outputs.values() if x.requires_grad]
        path = f"{self.name}." if self.name else ""
        trained = {f"{path}{n}": p for n, p in self.module.named_parameters() if p.requires_grad}
        targets = {**trained, **inputs}
        if not roots or not targets:
            return {}
        # The reference and the kernel must compute gradients of the same weighted sum.
        generator = torch.Generator(self.device).manual_seed(0)
        output_gradients = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in roots]
        # autograd.grad bypasses the hooks on accumulated gradients, which belong to an optimizer step.
        grads = torch.autograd.grad(roots, [*targets.values()], output_gradients, allow_unused=True)
        return collect_named_gradients(dict(zip(targets, grads, strict=True)))


def _call_without_output_capture(call: Callable[[], Any]) -> Any:
    """Call a function without Transformers' collection of layer outputs (`utils/output_capturing.py`)."""
    # Run in a copy of the context, so that the variable is unchanged after the call.
    context_copy = copy_context()
    for variable in context_copy:
        if variable.name == _COLLECTOR_VARIABLE:
            context_copy.run(variable.set, None)
    return context_copy.run(call)


def _save_tensor_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


setattr(_save_tensor_unchanged, COUNTS_ONLY, True)


def is_float_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def list_float_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if is_float_tensor(leaf)]


@contextmanager
def _disable_tf32() -> Iterator[None]:
    """Disable TF32 inside the context, so that fp32 is computed in fp32."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    previous_flags = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = previous_flags
