"""Compare a kernel with the reference code, block by block, on the inputs that each block gets in a reference pass.

The weights of one block at a time are copied to fp32, so that the comparison that tells a small error from rounding
needs no second copy of a half-precision model. The rows of a micro-batch are its samples: pass several, with different
random draws. Sharded weights (FSDP2) are gathered while their block is compared, on all ranks in lockstep.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dit_lora.guard.comparison.block_call import BlockCall, list_float_tensors
from dit_lora.guard.comparison.parity_values import BLOCK_LIMITS, Values, compute_max_error, find_first_mismatch
from dit_lora.guard.fallbacks import Fallback, convert_to_fp32
from dit_lora.numerics.dtensors import keep_block_weights_gathered

MIN_PASSES = 32
"""Minimum number of block passes that test whether a kernel is deterministic: two per block in a deep model."""
_MAX_REFERENCE_RATIO = 4.0
"""On a GPU, a kernel may vary between runs this many times more than the reference code does."""

_MAX_BACKEND_ERROR = 0.02
"""Relative error by which a kernel may vary between runs on a GPU if an attention backend was requested."""


@dataclass(frozen=True)
class KernelDifference:
    """First place in a model where a kernel differs from its reference, or from itself in another run."""

    fallback: str
    module: str
    """The first module that differs, in order of execution; or the parameter or input whose gradient differs."""
    error: float
    """RMS of the difference over RMS of the reference, for the worst sample; NaN if a value is not finite."""
    is_deterministic: bool = True
    """True if the kernel gives the same values for the same inputs."""

    @property
    def message(self) -> str:
        error = f"relative error {self.error:.2g}"
        if self.is_deterministic:
            return f"kernel {self.fallback} differs from its reference at {self.module} ({error})"
        summary = f"kernel {self.fallback} is nondeterministic at {self.module}"
        return f"{summary}: the same inputs gave other values ({error})"


@dataclass
class ComparisonCoverage:
    """Names of the blocks that a kernel comparison covered, and the reason for each block that it did not."""

    compared: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)


GradFlags = dict[str, tuple[bool, ...]]
"""For each block name, one flag per floating-point input: True if it requires a gradient in training."""


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of a kernel comparison, apart from the model and the function that runs it."""

    grad_flags: GradFlags | None = None
    """Which block inputs require a gradient in training; None to find out in an extra pass."""
    coverage: ComparisonCoverage | None = None
    """Filled with the names of the compared blocks; None if not needed."""
    min_passes: int = MIN_PASSES
    """Minimum number of block passes that test whether the kernel is deterministic."""
    block_names: Collection[str] | None = None
    """The blocks to compare; None for all."""
    adds_second_row: bool = False
    """True to add a second row to inputs of one sample, since a kernel that mixes up rows is correct for one row."""


def find_blocks(model: nn.Module) -> list[str]:
    """Names of modules that together cover the model: its repeated blocks, and the modules outside them."""
    module_lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    # A list of blocks has modules of one class that have submodules.
    uniform_lists = {name: blocks for name, blocks in module_lists.items() if len(set(map(type, blocks))) == 1}
    lists = {name for name, blocks in uniform_lists.items() if any(True for _ in blocks[0].children())}
    # All ancestors of a block list: `a` and `a.b` of the list `a.b.c`.
    ancestors = {name.rsplit(".", k)[0] for name in lists for k in range(1, name.count(".") + 1)}
    names: list[str] = []
    for name, _ in model.named_modules():
        # `named_modules` yields submodules right after their module.
        is_part = names and name.startswith(f"{names[-1]}.")
        if name and name not in lists and name not in ancestors and not is_part:
            names.append(name)
        elif name.rpartition(".")[0] in lists and not is_part:
            names.append(name)  # lists inside a block are part of the block
    return names or [""]


@contextmanager
def hook_blocks(model: nn.Module, names: Iterable[str], hook: Callable[..., None]) -> Iterator[None]:
    """Call `hook` with name, block, args and kwargs before each call of one of these blocks, inside the context."""
    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(partial(hook, name), with_kwargs=True)
            stack.enter_context(handle)
        yield


@contextmanager
def record_grad_flags(model: nn.Module) -> Iterator[GradFlags]:
    """Record, during a training forward pass, which inputs of which blocks require a gradient."""
    flags_by_block: GradFlags = {}

    def record(name: str, _block: nn.Module, args: Any, kwargs: Any) -> None:
        flags_by_block.setdefault(name, tuple(x.requires_grad for x in list_float_tensors((args, kwargs))))

    with hook_blocks(model, find_blocks(model), record):
        yield flags_by_block


@dataclass
class BlockComparison:
    """Compares a model with a kernel on and off, in every block that a forward pass reaches.

    `differences` holds the places that differ, in order of execution.
    """

    model: nn.Module
    fallback: Fallback
    disabled_fallbacks: Sequence[Fallback]
    """Switches that are off during the whole comparison."""
    fallbacks_without_fp32: Sequence[Fallback]
    """Switches without fp32 support, which are off in fp32 computations."""
    options: ComparisonOptions
    inner_block: str | None = None
    """The only block to compare, including the outputs of its submodules; None for all blocks."""
    coverage: ComparisonCoverage = field(default_factory=ComparisonCoverage)
    differences: list[KernelDifference] = field(default_factory=list)

    def run(self, forward: Callable[[], Any]) -> None:
        """Run the model once with its reference code, and compare the kernel in each block on the way."""
        names = [self.inner_block] if self.inner_block is not None else find_blocks(self.model)
        names = [name for name in names if self.options.block_names is None or name in self.options.block_names]
        # Spread `min_passes` over all blocks. A block needs at least two passes to compare with each other.
        self._num_runs = max(2, math.ceil(self.options.min_passes / max(1, sum(map(is_list_element, names)))))
        self._is_comparing, self._reached_blocks = False, set[str]()
        with ExitStack() as stack:
            for fallback in self.disabled_fallbacks:
                stack.enter_context(fallback.disable_temporarily())
            # Run the pass with the reference code: a wrong kernel must not change the inputs of later blocks.
            self._disabled_kernel = stack.enter_context(ExitStack())
            self._disabled_kernel.enter_context(self.fallback.disable_temporarily())
            stack.enter_context(hook_blocks(self.model, names, self._compare_first_call))
            with torch.no_grad():
                forward()

    @contextmanager
    def _enable_kernel(self) -> Iterator[None]:
        """Turn the fused kernel on inside the context; outside it, the model runs the reference code."""
        self._disabled_kernel.close()
        try:
            yield
        finally:
            self._disabled_kernel.enter_context(self.fallback.disable_temporarily())

    def _compare_first_call(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        # The comparison itself calls the block, and so this hook.
        if self._is_comparing or name in self._reached_blocks:
            return
        self._reached_blocks.add(name)
        self._is_comparing = True
        try:
            with _prepare_block_for_direct_call(block):
                self._compare_call(name, block, args, kwargs)
        except torch.OutOfMemoryError:
            self.coverage.skipped[name] = "not enough memory"
        finally:
            self._is_comparing = False

    def _compare_call(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self.options.adds_second_row:
            try:
                self._compare_block(self._make_block_call(name, block, args, kwargs, adds_second_row=True))
                return
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):  # the first dimension is not the batch
                pass
        self._compare_block(self._make_block_call(name, block, args, kwargs))

    def _make_block_call(
        self, name: str, block: nn.Module, args: Any, kwargs: Any, *, adds_second_row: bool = False
    ) -> BlockCall:
        outer_model = self.model if self.inner_block is not None else None
        learning = (self.options.grad_flags or {}).get(name, ())
        return BlockCall(name, block, args, kwargs, learning, outer_model=outer_model, adds_second_row=adds_second_row)

    def _compare_block(self, block: BlockCall) -> None:
        # Backends such as flash attention do not support fp32.
        is_half_precision = block.is_half and self.fallback.cause != "attention_backend"
        # `exact` holds the reference's fp32 values, which tell an error from rounding.
        difference, exact = None, None
        if is_half_precision:
            try:
                difference, exact = self._compare_in_fp32(block)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the stock code may insist on a dtype
                if block.has_second_row:
                    raise
                reason = str(error).partition("\n")[0]
                self.coverage.skipped[block.name] = f"it does not run in fp32: {reason}"
                return
        expected, fused = self._compute_with_and_without_kernel(block, uses_fp32=False)
        dtype = block.dtype if block.is_half else torch.float32
        with torch.no_grad():
            # NaN equals nothing, so reference values that contain it cannot be compared.
            if not all(torch.isfinite(x).all() for x in expected.values()) and not is_half_precision:
                self.coverage.skipped[block.name] = "its stock values are not finite"
                return
            difference = difference or self._find_difference(block, expected, fused, dtype, exact)
        # Release the fp32 values before the block runs again.
        del exact
        self.coverage.compared.add(block.name)
        run_difference = self._measure_run_difference(block, expected, fused) if self.inner_block is None else None
        if run_difference is not None:
            self.differences.append(
                KernelDifference(self.fallback.name, block.name, run_difference, is_deterministic=False)
            )
        elif difference is not None:
            self.differences.append(KernelDifference(self.fallback.name, *difference))

    def _compare_in_fp32(self, block: BlockCall) -> tuple[tuple[str, float] | None, Values]:
        """Compare a block in fp32; returns the first difference, or None, and the reference code's fp32 values."""
        with ExitStack() as stack:
            # Autocast would compute in half precision again.
            stack.enter_context(torch.autocast(block.device.type, enabled=False))
            if any(True for _ in block.module.parameters()):
                stack.enter_context(convert_to_fp32(block.module))
            for fallback in self.fallbacks_without_fp32:
                stack.enter_context(fallback.disable_temporarily())
            expected, fused = self._compute_with_and_without_kernel(block, uses_fp32=True)
            return self._find_difference(block, expected, fused, torch.float32), expected

    def _compute_with_and_without_kernel(self, block: BlockCall, *, uses_fp32: bool) -> tuple[Values, Values]:
        # The kernel is off outside the context below.
        expected = block.compute_values(uses_fp32=uses_fp32)
        with self._enable_kernel():
            return expected, block.compute_values(uses_fp32=uses_fp32)

    def _find_difference(
        self, block: BlockCall, expected: Values, fused: Values, dtype: torch.dtype, exact: Values | None = None
    ) -> tuple[str, float] | None:
        # In half precision, the change that a block adds to its input can be as small as rounding.
        inputs = block.inputs if dtype is torch.float32 else ()
        limits = BLOCK_LIMITS[dtype]
        if dtype is not torch.float32:
            limits = limits.add_rounding_error(self.fallback.rounding_error)
        return find_first_mismatch(expected, fused, limits, inputs, exact)

    def _measure_run_difference(self, block: BlockCall, expected: Values, fused: Values) -> float | None:
        """Relative error between the kernel's runs on equal inputs, or None if the reference code varies as much."""
        allowed = 0.0
        if block.device.type == "cuda":  # PyTorch's CUDA ops may sum in any order
            # The reference, too, may differ between two runs on equal inputs.
            allowed = _MAX_REFERENCE_RATIO * compute_max_error(expected, block.compute_values(uses_fp32=False))
            if self.fallbacks_without_fp32 or self.fallback.cause == "attention_backend":
                # Flash attention's backward sums in any order, even if the reference uses another backend.
                allowed = max(allowed, _MAX_BACKEND_ERROR)
        # A module outside the lists occurs once, and gets the minimum of two runs.
        num_runs = self._num_runs if is_list_element(block.name) else 2
        with self._enable_kernel():
            # Make all runs even after a difference: ranks that share a sample run a block together.
            error = max(compute_max_error(fused, block.compute_values(uses_fp32=False)) for _ in range(num_runs - 1))
        return error if error > allowed else None


def is_list_element(block: str) -> bool:
    """True if a block is an element of a `ModuleList`."""
    return block.rpartition(".")[2].isdigit()


@contextmanager
def _prepare_block_for_direct_call(block: nn.Module) -> Iterator[None]:
    """Gather the block's weights inside the context, and let autocast recompute its casts."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()  # casts cached in a pass without gradients do not propagate gradients
    try:
        # Sharded weights stay whole while the block is compared.
        with keep_block_weights_gathered(block):
            yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
        torch.clear_autocast_cache()
