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
from dit_lora.guard.switches import eager
from dit_lora.numerics import objectives
from dit_lora.numerics.opaque import ONLY_COUNTS
from dit_lora.patching import Patches
from dit_lora.training.execution.activation_checkpointing import (
    MODES,
    Mode,
    blocks_called_by,
    keeps_outputs,
    supports_checkpointing,
)
from dit_lora.training.execution.fake_step import FakeStep, Losses

Needs = Mapping[Mode, int]
"""Peak bytes of activations in a step, by mode; only `none` for a model without checkpointing."""

SHARE = 0.9
"""Share of the free memory that activations may take. The rest is for gradients in flight (0.4 to 0.7 GiB in the
backward pass of CogVideoX-5B, counted on fake tensors) and the allocator's rounding.
"""


@dataclass
class _Block:
    """Storages of one checkpointed call, by number."""

    inputs: set[int]
    in_every_mode: bool
    saved: set[int] = field(default_factory=set)
    attention: set[int] = field(default_factory=set)


class _Ledger:
    """The bytes that a forward pass saves for backward: each storage once, without weights and buffers."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        # Keep storages alive: a number is an address, which a later tensor could reuse.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._weights = self._numbers(weights)
        self.outside: set[int] = set()
        self.blocks: list[_Block] = []
        self._current: _Block | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pack hook of autograd: called with each tensor that it saves."""
        # Tensors saved outside of blocks are kept in every mode.
        saved = self.outside if self._current is None else self._current.saved
        saved |= self._activations([tensor])
        return tensor.detach()

    # Tells other code that this hook leaves the saved tensors as they are.
    setattr(pack, ONLY_COUNTS, True)

    @contextmanager
    def block(self, inputs: Iterable[Any], *, in_every_mode: bool) -> Iterator[_Block]:
        """Count tensors saved inside the context as a block's: recomputed in every mode, or in some."""
        self._current = _Block(self._activations(inputs), in_every_mode)
        self.blocks.append(self._current)
        try:
            with _AttentionOutputs(self._current.attention, self._activations):
                yield self._current
        finally:
            self._current = None

    def needs(self) -> dict[Mode, int]:
        """Bytes kept until the backward pass, plus those that the largest block adds when it is recomputed, by
        mode.
        """
        # Full checkpointing keeps the blocks' inputs, selective also their attention outputs, `none` all that they
        # save.
        # `none` below also keeps the inputs of calls that are recomputed in every mode.
        kept_in_full = self.outside.union(*(block.inputs for block in self.blocks))
        some = [block for block in self.blocks if not block.in_every_mode]
        always = [block for block in self.blocks if block.in_every_mode]
        attention = kept_in_full.union(*(block.attention for block in some))
        return {
            "none": self._peak(
                self.outside.union(
                    *(block.inputs for block in always), *(block.saved for block in some)
                )
            ),
            "selective": self._peak(attention),
            "full": self._peak(kept_in_full),
        }

    def _peak(self, kept: set[int]) -> int:
        # A recomputed block holds what it saves until its backward pass ends; blocks take turns.
        recomputed_bytes = (self._bytes(block.saved - kept) for block in self.blocks)
        return self._bytes(kept) + max(recomputed_bytes, default=0)

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(self._storages[number].nbytes() for number in numbers)

    def _activations(self, values: Iterable[Any]) -> set[int]:
        return self._numbers(v for v in values if isinstance(v, torch.Tensor)) - self._weights

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        # By storage, not by tensor: views share their memory.
        storages = {(s := tensor.untyped_storage())._cdata: s for tensor in tensors}
        self._storages |= storages
        return set(storages)


class _AttentionOutputs(TorchDispatchMode):
    """Records the outputs of attention ops that selective checkpointing keeps."""

    def __init__(self, found: set[int], numbers: Callable[[Iterable[Any]], set[int]]) -> None:
        super().__init__()
        self._found, self._numbers_of = found, numbers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if keeps_outputs(func, args, kwargs or {}):
            self._found |= self._numbers_of(tree_leaves(output))
        return output


def measure(
    transformer: nn.Module,
    losses: Losses,
    batch: Spec,
    device: torch.device,
    known: Tensors | None = None,
    alone: AbstractContextManager[None] | None = None,
) -> Needs:
    """Peak bytes of activations under each mode, for `losses` of a batch of these shapes and dtypes.

    `known` holds integers that the forward depends on, such as token ids. Inside `alone`, one process can call the
    model by itself. Autograd's saved-tensor hooks count the bytes of a `FakeStep` on `device`, with the unpatched
    forward, autocast and attention. Checkpointing must be off, and is off afterwards. Raises the errors of
    `FakeStep.run`.
    """
    step = FakeStep(transformer, batch, known, device)
    ledger = _Ledger(step.weights.values())
    with (
        alone or nullcontext(),
        eager(transformer),
        _blocks_into(ledger, transformer),
        saved_tensors_hooks(ledger.pack, lambda saved: saved),
    ):
        step.run(losses)
    needs = ledger.needs()
    return needs if supports_checkpointing(transformer) else {"none": needs["none"]}


@contextmanager
def _blocks_into(ledger: _Ledger, transformer: nn.Module) -> Iterator[None]:
    """Record checkpointed blocks and chunks of logits in the ledger while the context is open."""

    def run(block: Callable[..., Any], *args: Any) -> Any:
        # Transformers passes a partial that holds further inputs of the block.
        partial_kwargs = block.keywords if isinstance(block, partial) else {}
        with ledger.block(tree_leaves((args, partial_kwargs)), in_every_mode=False):
            return block(*args)

    def recomputed(_stock: Any, function: Callable[..., Any], *args: Any) -> Any:
        with ledger.block(args, in_every_mode=True):
            return function(*args)

    patches = Patches()
    # The losses recompute chunks of logits in every mode, whatever `train.checkpointing` is.
    patches.method(objectives, "recomputed", recomputed)
    try:
        with blocks_called_by(transformer, run):
            yield
    finally:
        patches.undo()


class Advice(NamedTuple):
    """A mode, a message with its reason, and whether it should fit."""

    mode: Mode
    words: str
    fits: bool


def advise(needs: Needs, free: int, asked: Literal["auto", Mode]) -> Advice:
    """Choose the mode with the least recomputation that fits `SHARE` of the free bytes, or the requested one.

    If nothing fits, `auto` takes the mode that needs least memory. `free` is in bytes.
    """
    # In the order of increasing recomputation: the first that fits is the fastest.
    fitting = [mode for mode in MODES if mode in needs and needs[mode] <= SHARE * free]
    best = fitting[0] if fitting else min(needs, key=lambda mode: needs[mode])
    mode = best if asked == "auto" else asked
    # At most two other modes, for example `selective would need 3.1, full 1.2`, in GiB.
    alternatives = ", ".join(
        f"{alternative} {'would need ' * is_first}{_gib(needs[alternative])}"
        for alternative, is_first in zip(
            (m for m in needs if m != mode), (True, False), strict=False
        )
    )
    message = f"{mode}: activations {_gib(needs[mode])} of {_gib(free)} GiB free"
    return Advice(mode, f"{message} ({alternatives})" if alternatives else message, mode in fitting)


def _gib(count: int) -> str:
    size = count / 2**30
    return f"{size:.3g}" if size < 100 else f"{size:.0f}"
