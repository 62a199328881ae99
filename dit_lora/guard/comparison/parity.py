"""Compare a fused kernel with its reference, and with itself, on the user's model, shapes and samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dit_lora.guard.comparison.block_parity import (
    BlockComparison,
    ComparisonOptions,
    KernelDifference,
    record_grad_flags,
)
from dit_lora.guard.comparison.parity_values import (
    GRADIENT_PREFIX,
    MODEL_LIMITS,
    Values,
    collect_named_gradients,
    compute_max_error,
    disable_dropout,
    find_first_mismatch,
    randomize_zero_weights,
    record_outputs,
)
from dit_lora.guard.fallbacks import COMPILE, Fallback, disable_compile, list_model_fallbacks
from dit_lora.guard.replay import get_cuda_devices
from dit_lora.numerics.dtensors import gather_full_tensor, has_collective_forward
from dit_lora.numerics.opaque import iterate_called_modules
from dit_lora.numerics.ranks import gather_object

LossFunction = Callable[[], torch.Tensor]
"""Runs the model on the same inputs at each call; returns losses per sample, (B,)."""


def find_first_difference(
    fallback: Fallback,
    compute_losses: LossFunction,
    model: nn.Module,
    *,
    disabled_fallbacks: Sequence[Fallback] = (),
    options: ComparisonOptions | None = None,
) -> KernelDifference | None:
    """Find the first place where outputs or gradients with a kernel differ from those without it, or between runs.

    None if there is none. `disabled_fallbacks` are off all the time. Pass losses of several different samples:
    OpenDiT's fused modulation used the first sample's scale and shift for all of them, and was correct for a batch of
    one. Blocks are compared one at a time on the reference model's inputs; those in half precision also in fp32, which
    tells a small error from rounding. A fallback that concerns no single block (torch.compile, another attention for a
    whole model) is compared in the whole model, in its dtype. A sharded model (FSDP2) is compared on all ranks
    together.
    """
    options = options or ComparisonOptions()
    is_in_blocks = fallback.cause == "kernel" or fallback.parent is not None
    with ExitStack() as stack:
        if fallback.name == COMPILE or not is_in_blocks:
            for other_fallback in disabled_fallbacks:
                stack.enter_context(other_fallback.disable_temporarily())
            difference = _compare_whole_model(fallback, compute_losses, model)
            if options.coverage is not None:
                options.coverage.compared.add("")
            return difference
        # An extra training forward shows which block inputs need a gradient.
        if options.grad_flags is None:
            with (
                record_grad_flags(model) as flags,
                torch.enable_grad(),
                disable_compile(model),
                torch.random.fork_rng(get_cuda_devices(model)),
            ):
                compute_losses()
            options = replace(options, grad_flags=flags)
        stack.enter_context(_preserve_model_state(model))
        return _compare_blocks(fallback, compute_losses, model, disabled_fallbacks, options)


def iter_differences(
    fallbacks: Sequence[Fallback], compare: Callable[[Fallback, Sequence[Fallback]], KernelDifference | None]
) -> Iterator[tuple[Fallback, KernelDifference]]:
    """Yield every fallback whose kernel differs from the reference.

    If a whole component differs, its parts are compared separately, with all others disabled. `compare` receives a
    fallback and the other fallbacks to use meanwhile, so that one kernel's error is not attributed to another. Disable
    each yielded component before asking for the next one: then the whole is compared once more.
    """
    wholes = [fallback for fallback in fallbacks if fallback.parent is None]
    # Compilation and kernels that add rounding come last: they run on top of the others, which must be correct first.
    wholes.sort(key=lambda fallback: (fallback.name == COMPILE, fallback.rounding_error > 0))
    for fallback in wholes:
        runs_on_top = fallback.name == COMPILE or fallback.rounding_error > 0
        other_kernels = [kernel for kernel in wholes if kernel is not fallback and kernel.name != COMPILE]
        other_fallbacks = [] if runs_on_top else other_kernels
        whole_difference = compare(fallback, other_fallbacks)
        if whole_difference is None:
            continue
        parts = [part for part in fallbacks if part.parent == fallback.name]
        has_bad_part = False
        # Compare each part with all others off, so that an error is attributed to one of them.
        for part in parts:
            other_parts = [sibling for sibling in parts if sibling is not part]
            difference = compare(part, [*other_fallbacks, *other_parts])
            if difference is not None:
                has_bad_part = True
                yield part, difference
        # The bad parts are off by now, so compare the remaining parts together.
        if has_bad_part:
            whole_difference = compare(fallback, other_fallbacks)
        if whole_difference is not None:
            yield fallback, whole_difference


@contextmanager
def _preserve_model_state(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers, random state and gradients on exit; nothing runs compiled inside the context."""
    # Blocks run many times, and some, such as batch norms, write to buffers.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with (
        randomize_zero_weights(model),
        disable_dropout(model),
        disable_compile(model),
        torch.random.fork_rng(get_cuda_devices(model)),
    ):
        try:
            yield
        finally:
            for buffer, copy in buffers:
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)


def _compare_blocks(
    fallback: Fallback,
    compute_losses: LossFunction,
    model: nn.Module,
    disabled_fallbacks: Sequence[Fallback],
    options: ComparisonOptions,
) -> KernelDifference | None:
    # Attention backends are parts of this kernel; flash attention, for one, does not compute in fp32.
    parts = [part for part in list_model_fallbacks(model) if part.parent == fallback.name]
    backends = [part for part in parts if part.cause == "attention_backend"]

    def run_comparison(inner_block: str | None) -> BlockComparison:
        comparison = BlockComparison(model, fallback, disabled_fallbacks, backends, options, inner_block)
        comparison.run(compute_losses)
        return comparison

    comparison = run_comparison(None)
    if options.coverage is not None:
        options.coverage.compared |= comparison.coverage.compared
        options.coverage.skipped |= comparison.coverage.skipped
    difference = _select_first_difference(comparison.differences, model)
    # Compare inside that block to find the submodule. The block's name ends at the first space.
    if difference is not None and difference.is_deterministic and not difference.module.startswith(GRADIENT_PREFIX):
        block = difference.module.partition(" ")[0]
        difference = _select_first_difference(run_comparison(block).differences, model) or difference
    return difference


def _select_first_difference(
    block_differences: Sequence[KernelDifference], model: nn.Module
) -> KernelDifference | None:
    """Select the first nondeterministic difference, else the first one; equal on all ranks of a sharded model."""
    # The next comparison is collective, so all ranks must choose the same place.
    lists_by_rank = gather_object([list(block_differences)]) if has_collective_forward(model) else [block_differences]
    all_differences = [candidate for rank_differences in lists_by_rank for candidate in rank_differences]
    # `min` returns the first of equal ones, and False is less than True.
    return min(all_differences, key=lambda candidate: candidate.is_deterministic, default=None)


def _compare_whole_model(
    fallback: Fallback, compute_losses: LossFunction, model: nn.Module
) -> KernelDifference | None:
    # First the transformer's repeated blocks, and the modules outside them. A list inside a block is part of it.
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [n for n in lists if not any(n.startswith(f"{list_name}.") for list_name in lists)]
    outside = [name for name, _ in model.named_children() if name not in outermost]
    blocks = [f"{name}.{child}" for name in outermost for child, _ in model.get_submodule(name).named_children()]
    difference = _compare_modules(fallback, compute_losses, model, [*outside, *blocks])
    if difference is None or not difference.is_deterministic or difference.module.startswith(GRADIENT_PREFIX):
        return difference
    # Then inside the block. Names such as "blocks.0 (output 1)" end at the first space.
    block = difference.module.partition(" ")[0]
    inside = [name for name, _ in iterate_called_modules(model) if name.startswith(f"{block}.")]
    return _compare_modules(fallback, compute_losses, model, inside) or difference


def _compare_modules(
    fallback: Fallback, compute_losses: LossFunction, model: nn.Module, modules: Sequence[str]
) -> KernelDifference | None:
    with randomize_zero_weights(model), disable_dropout(model):
        with fallback.disable_temporarily():
            references = _compute_values(compute_losses, model, modules)
        fused = _compute_values(compute_losses, model, modules)
        # Compare the kernel with itself: the reference cannot tell a race condition from an error.
        run_difference = compute_max_error(fused, _compute_values(compute_losses, model, modules))
        if any(p.is_cuda for p in model.parameters()):
            # On CUDA, PyTorch's ops may sum in any order.
            run_difference = 0.0
    # Use the lowest dtype of the computation. Gradients of fp32 adapters, for example, are stored in a higher one.
    dtypes = [x.dtype for x in references.values() if x.dtype in MODEL_LIMITS]
    lowest_dtype = max(dtypes, key=lambda dtype: MODEL_LIMITS[dtype].output, default=torch.float32)
    mismatch = find_first_mismatch(references, fused, MODEL_LIMITS[lowest_dtype])
    difference = None
    # A kernel that disagrees with itself cannot be compared with its reference.
    if run_difference:
        difference = KernelDifference(fallback.name, "the whole model", run_difference, is_deterministic=False)
    elif mismatch is not None:
        difference = KernelDifference(fallback.name, *mismatch)
    if has_collective_forward(model):  # all ranks must return the same result
        return next((candidate for candidate in gather_object([difference]) if candidate is not None), None)
    return difference


def _compute_values(compute_losses: LossFunction, model: nn.Module, modules: Sequence[str]) -> Values:
    """Run the model; returns these modules' outputs in order, then every trained parameter's gradient, on the CPU."""
    values: Values = {}
    with record_outputs(model, modules, values), torch.random.fork_rng(get_cuda_devices(model)):
        grads = _compute_gradients(compute_losses().mean(), dict(model.named_parameters()))
    return values | collect_named_gradients({name: grad.cpu().clone() for name, grad in grads.items()})


def _compute_gradients(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter]) -> Values:
    """Compute the gradients of the loss by parameter name.

    The parameters' `grad` attributes are unchanged afterwards.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not any(isinstance(parameter, DTensor) for parameter in trained.values()):
        # autograd.grad bypasses the hooks on accumulated gradients, which DDP would take for its step's.
        grads = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(trained, grads, strict=True)
        return {name: gradient for name, gradient in pairs if gradient is not None}
    # FSDP2 computes with gathered copies, so only a full backward pass sets gradients on its parameters.
    saved_grads = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        loss.backward()
        return {name: gather_full_tensor(p.grad) for name, p in parameters.items() if p.grad is not None}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = saved_grads[name]
