"""Chooses a run's gradient checkpointing from the memory of its activations, counted before the first step.

Counts the run's own model, autocast and shapes on fake tensors: no weight is read, no memory allocated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit_lora.data.cache.cache import Spec
from dit_lora.families.base import Tensors
from dit_lora.guard.fallbacks import disable_compile
from dit_lora.numerics import objectives
from dit_lora.numerics.opaque import COUNTS_ONLY
from dit_lora.patching import Patches
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    CheckpointingMode,
    should_keep_outputs,
    supports_checkpointing,
    use_block_caller,
)
from dit_lora.training.execution.fake_step import FakeStep, Losses

PeakBytes = Mapping[CheckpointingMode, int]
"""Peak bytes of activations in a step, by mode; only `none` for a model without checkpointing."""

MAX_MEMORY_SHARE = 0.9
"""Share of the free memory that activations may take. The rest is for gradients in flight (0.4 to 0.7 GiB in the
backward pass of CogVideoX-5B, counted on fake tensors) and the allocator's rounding.
"""


@dataclass
class _BlockRecord:
    """Storages that one checkpointed call saves for backward, by number."""

    inputs: set[int]
    is_always_recomputed: bool
    saved: set[int] = field(default_factory=set)
    attention_outputs: set[int] = field(default_factory=set)


class _SavedTensorCounter:
    """The bytes that a forward pass saves for backward: each storage once, without weights and buffers."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        # Keep storages alive: a number is an address, which a later tensor could reuse.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._weights = self._register_storages(weights)
        self.saved_outside_blocks: set[int] = set()
        self.blocks: list[_BlockRecord] = []
        self._current_block: _BlockRecord | None = None

    def record_saved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves for backward. Used as a pack hook of autograd's saved tensors."""
        # Tensors saved outside of blocks are kept in every mode.
        saved = self.saved_outside_blocks if self._current_block is None else self._current_block.saved
        saved |= self._register_activations([tensor])
        return tensor.detach()

    # Tells other code that this hook leaves the saved tensors as they are.
    setattr(record_saved_tensor, COUNTS_ONLY, True)

    @contextmanager
    def record_block(self, inputs: Iterable[Any], *, is_always_recomputed: bool) -> Iterator[_BlockRecord]:
        """Count tensors that autograd saves inside the context as those of one transformer block.

        `is_always_recomputed`: every mode of activation checkpointing recomputes the block, not only some modes.
        """
        self._current_block = _BlockRecord(self._register_activations(inputs), is_always_recomputed)
        self.blocks.append(self._current_block)
        try:
            with _AttentionOutputRecorder(self._current_block.attention_outputs, self._register_activations):
                yield self._current_block
        finally:
            self._current_block = None

    def compute_peak_activation_bytes(self) -> dict[CheckpointingMode, int]:
        """Bytes of activations by checkpointing mode.

        They are those kept until the backward pass, plus those that the largest block adds when recomputed.
        """
        # Full checkpointing keeps the blocks' inputs, selective also their attention outputs. `none` keeps all that
        # they save, and the inputs of calls that are recomputed in every mode.
        kept_in_full = self.saved_outside_blocks.union(*(block.inputs for block in self.blocks))
        some = [block for block in self.blocks if not block.is_always_recomputed]
        always = [block for block in self.blocks if block.is_always_recomputed]
        kept_in_selective = kept_in_full.union(*(block.attention_outputs for block in some))
        kept_in_none = self.saved_outside_blocks.union(*(b.inputs for b in always), *(b.saved for b in some))
        return {
            "none": self._compute_peak(kept_in_none),
            "selective": self._compute_peak(kept_in_selective),
            "full": self._compute_peak(kept_in_full),
        }

    def _compute_peak(self, kept_storages: set[int]) -> int:
        # A recomputed block holds what it saves until its backward pass ends; blocks take turns.
        recomputed_bytes = (self._sum_bytes(block.saved - kept_storages) for block in self.blocks)
        return self._sum_bytes(kept_storages) + max(recomputed_bytes, default=0)

    def _sum_bytes(self, storage_ids: Iterable[int]) -> int:
        return sum(self._storages[number].nbytes() for number in storage_ids)

    def _register_activations(self, values: Iterable[Any]) -> set[int]:
        return self._register_storages(v for v in values if isinstance(v, torch.Tensor)) - self._weights

    def _register_storages(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        # By storage, not by tensor: views share their memory.
        storages = {(s := tensor.untyped_storage())._cdata: s for tensor in tensors}
        self._storages |= storages
        return set(storages)


class _AttentionOutputRecorder(TorchDispatchMode):
    """Records the outputs of attention ops that selective checkpointing keeps."""

    def __init__(self, recorded: set[int], register_storages: Callable[[Iterable[Any]], set[int]]) -> None:
        super().__init__()
        self._recorded, self._register_storages = recorded, register_storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if should_keep_outputs(func, args, kwargs or {}):
            self._recorded |= self._register_storages(tree_leaves(output))
        return output


def measure_activations(
    transformer: nn.Module,
    losses: Losses,
    batch: Spec,
    device: torch.device,
    integer_inputs: Tensors | None = None,
    forward_context: AbstractContextManager[None] | None = None,
) -> PeakBytes:
    """Peak bytes of activations under each mode, for `losses` of a batch of these shapes and dtypes.

    `integer_inputs` holds integers that the forward depends on, such as token ids. Inside `forward_context`, one
    process can call the model by itself. Saved-tensor hooks count the bytes of a `FakeStep` on `device`. Checkpointing
    must be off, and is off afterwards. Raises the errors of `FakeStep.run_on_fake_weights`.
    """
    step = FakeStep(transformer, batch, integer_inputs, device)
    # Weights are saved for the backward pass too, but take no further memory.
    ledger = _SavedTensorCounter(step.weights.values())
    with (
        forward_context or nullcontext(),
        disable_compile(transformer),
        _record_blocks(ledger, transformer),
        saved_tensors_hooks(ledger.record_saved_tensor, lambda saved: saved),
    ):
        step.run_on_fake_weights(losses)
    needs = ledger.compute_peak_activation_bytes()
    return needs if supports_checkpointing(transformer) else {"none": needs["none"]}


@contextmanager
def _record_blocks(ledger: _SavedTensorCounter, transformer: nn.Module) -> Iterator[None]:
    """Record checkpointed blocks and chunks of logits in the ledger while the context is open."""

    def run_block(block: Callable[..., Any], *args: Any) -> Any:
        # Transformers passes a partial that holds further inputs of the block.
        partial_kwargs = block.keywords if isinstance(block, partial) else {}
        with ledger.record_block(tree_leaves((args, partial_kwargs)), is_always_recomputed=False):
            return block(*args)

    def recompute(_original: Any, function: Callable[..., Any], *args: Any) -> Any:
        with ledger.record_block(args, is_always_recomputed=True):
            return function(*args)

    patches = Patches()
    # The losses recompute chunks of logits in every mode, whatever `train.checkpointing` is.
    patches.wrap_method(objectives, "call_with_recomputation", recompute)
    try:
        with use_block_caller(transformer, run_block):
            yield
    finally:
        patches.undo()


class CheckpointingAdvice(NamedTuple):
    """A choice of activation checkpointing: mode, message with its reason, and whether it should fit into memory."""

    mode: CheckpointingMode
    message: str
    fits: bool
    is_counted: bool = True
    """False if activations could not be counted."""


def advise_checkpointing(
    peak_bytes: PeakBytes, free_bytes: int, requested_mode: Literal["auto", CheckpointingMode]
) -> CheckpointingAdvice:
    """Choose the activation checkpointing mode: the requested one, or for `auto` one that fits into memory.

    `auto` takes the mode with the least recomputation that fits `MAX_MEMORY_SHARE` of the free bytes. If nothing fits,
    it takes the mode that needs least memory.
    """
    limit = MAX_MEMORY_SHARE * free_bytes
    # In the order of increasing recomputation: the first that fits is the fastest.
    fitting = [mode for mode in CHECKPOINTING_MODES if mode in peak_bytes and peak_bytes[mode] <= limit]
    best = fitting[0] if fitting else min(peak_bytes, key=lambda mode: peak_bytes[mode])
    mode = best if requested_mode == "auto" else requested_mode
    # At most two other modes, for example `selective would need 3.1, full 1.2`, in GiB.
    alternatives = ", ".join(
        f"{alternative} {'would need ' * is_first}{_format_gib(peak_bytes[alternative])}"
        for alternative, is_first in zip((m for m in peak_bytes if m != mode), (True, False), strict=False)
    )
    message = f"{mode}: activations need {_format_gib(peak_bytes[mode])} of {_format_gib(free_bytes)} GiB free"
    return CheckpointingAdvice(mode, f"{message} ({alternatives})" if alternatives else message, mode in fitting)


def _format_gib(num_bytes: int) -> str:
    size = num_bytes / 2**30
    return f"{size:.3g}" if size < 100 else f"{size:.0f}"
