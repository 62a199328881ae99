"""Compare a fused model with the stock one, once for each input shape of training."""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from dit_lora.errors import DitLoraError
from dit_lora.fuse.casts import refresh_lora_casts
from dit_lora.fuse.patches import ATTENTION, get_fusion
from dit_lora.guard.comparison.block_parity import ComparisonOptions
from dit_lora.guard.comparison.parity import KernelDifference, find_first_difference, iter_differences
from dit_lora.guard.fallbacks import Fallback, list_model_fallbacks
from dit_lora.guard.replay import get_cuda_devices

InputShapes = tuple[tuple[int, ...], ...]


class FirstForwardHook:
    """Forward pre-hook of a fused model: renews casts of adapters, drops full masks, checks kernels at new shapes.

    A mask that masks nothing becomes None if the model accepts None: with a mask, attention has fewer and slower
    backends. The test costs one synchronization with the device.

    The check runs forward and backward of the same inputs with and without each kernel, block by block, and restores
    gradients and random state. If the batch has one sample, each block gets a second one made from the first. A kernel
    that differs is switched off with a warning; if it was requested by name, `DitLoraError` is raised.
    """

    def __init__(self, check: bool) -> None:
        self.should_check = check
        self._compared_shapes: set[InputShapes] = set()
        self._is_comparing = False

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        # Traced or fake tensors have no values to compare, and no mask to read.
        if torch.compiler.is_compiling() or _is_fake(next(model.parameters(), None)):
            return None
        refresh_lora_casts(model)  # a write to an adapter's `.data` since the last forward left no trace
        fusion = get_fusion(model)
        if fusion is not None and fusion.is_on(ATTENTION):
            for name in ("attention_mask", "encoder_attention_mask"):
                mask = kwargs.get(name)
                # (B, K) of ones and zeros; masks with more dimensions are added to the scores.
                if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or _is_fake(mask):
                    continue
                parameter = inspect.signature(type(model).forward).parameters.get(name)
                if parameter is not None and parameter.default is None and bool((mask == 1).all()):
                    kwargs = kwargs | {name: None}
        if self.should_check and not self._is_comparing and torch.is_grad_enabled():
            self._compare_kernels_once(model, args, kwargs)
        return args, kwargs

    def _compare_kernels_once(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Compare fused kernels with the stock model at the shapes of these inputs.

        Nothing happens if these shapes were compared before or a comparison is running.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A kernel may fail at one shape only, so each combination of input shapes is compared.
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if shapes in self._compared_shapes:
            return
        self._is_comparing = True  # the comparison calls the model, and so this hook
        try:
            if self._compare_all_kernels(model, args, kwargs):
                self._compared_shapes.add(shapes)
        finally:
            self._is_comparing = False

    def _compare_all_kernels(self, model: nn.Module, args: Any, kwargs: Any) -> bool:
        """Compare each fused kernel with the stock model, and switch off (or refuse) those that differ.

        Returns False if these inputs cannot show a difference, because the stock model's outputs are NaN or Inf.
        """

        def compute_losses() -> torch.Tensor:
            sample_means = []
            # A model may return a tuple, a dict or an output class.
            for output in tree_leaves(model(*args, **kwargs)):
                if isinstance(output, torch.Tensor) and output.is_floating_point():
                    # Each element has a fixed random weight. With a plain mean all elements would have one gradient,
                    # and errors that cancel in a sum would not be seen.
                    generator = torch.Generator().manual_seed(0)
                    weights = torch.randn(output.shape[1:], generator=generator).to(output.device)
                    sample_means.append((output.float() * weights).reshape(len(output), -1).mean(1))
            return torch.stack(sample_means).sum(0)  # (B,)

        fusion = get_fusion(model)
        assert fusion is not None
        # Fork the random state: the training step itself does not have this forward.
        with torch.no_grad(), fusion.use_stock_code(), torch.random.fork_rng(get_cuda_devices(model)):
            if not torch.isfinite(compute_losses()).all():
                return False
        # Only kernels: compilation has a fallback too, but this check is not about it.
        kernels = [switch for switch in list_model_fallbacks(model) if switch.name != "compile"]
        options = ComparisonOptions(adds_second_row=_is_single_sample(model, args, kwargs))

        def compare_kernel(fallback: Fallback, other_fallbacks: Sequence[Fallback]) -> KernelDifference | None:
            return find_first_difference(
                fallback, compute_losses, model, disabled_fallbacks=other_fallbacks, options=options
            )

        for switch, difference in iter_differences(kernels, compare_kernel):
            if switch.required:
                raise DitLoraError(format_required_error(switch, difference.message))
            # Under `auto` the model trains on without this kernel.
            switch.disable()
            warnings.warn(f"{difference.message}; switched off: {switch.replacement}", stacklevel=2)
        return True


def _is_single_sample(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """True if these model inputs are a batch of one sample, judged by the first input with at least two dimensions."""
    # In the signature's order, whatever order keyword arguments came in.
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    for value in arguments.values():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        batched = [tensor for tensor in tensors if tensor.ndim > 1]
        if batched:  # a list has one tensor per sample
            return len(value if isinstance(value, list) else batched[0]) == 1
    return False


def _is_fake(value: object) -> bool:
    """True for a tensor without values (fake or meta)."""
    return isinstance(value, FakeTensor) or getattr(value, "is_meta", False)


def format_required_error(fallback: Fallback, message: str) -> str:
    """Error message for a kernel that was requested by name and cannot be used."""
    return f"{message}; it is set to on: set it to auto or off to train without it"
