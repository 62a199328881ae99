"""Compare a kernel with the stock code, block by block, on the inputs that a stock pass brings to each block.

One block's weights at a time are copied to fp32, so that the comparison that tells a small wrong from rounding needs
no second copy of a model in half precision. The rows of a micro-batch are its samples: give several, with draws of
their own. Weights that are sharded (FSDP2) are whole while their block is compared, on all ranks in step.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dit_lora.guard.comparison.block_call import BlockCall, floats
from dit_lora.guard.comparison.parity_values import BLOCK, Values, apart, first_apart
from dit_lora.guard.switches import Switch, in_fp32
from dit_lora.numerics.dtensors import gathered_here

PASSES = 32
"""Least number of passes through blocks that ask whether a kernel repeats itself: two a block in a deep model."""
_OF_STOCK = 4.0
"""Times farther that a kernel may be from itself, on a GPU, than the stock code is from itself there."""

_OF_BACKEND = 0.02
"""Relative error by which a kernel may differ from itself, on a GPU, where an attention backend was asked for."""


@dataclass(frozen=True)
class Apart:
    """The place where a kernel parts from the stock code, or from itself."""

    where: str
    error: float
    repeats: bool
    """True if the same inputs give the same values again."""


@dataclass
class Coverage:
    """Names of the blocks that were compared, and the reason for each that was not."""

    compared: set[str] = field(default_factory=set)
    missed: dict[str, str] = field(default_factory=dict)


Learning = dict[str, tuple[bool, ...]]
"""Flags by block name, one for each floating input: True if it has a gradient in training."""


@dataclass(frozen=True)
class How:
    """Options of a comparison, beside the model and what runs it."""

    learning: Learning | None = None
    """The inputs of blocks that have a gradient in training; None to look, in a pass of its own."""
    coverage: Coverage | None = None
    """Record of what was compared, to be filled."""
    passes: int = PASSES
    """Least number of passes through blocks that ask whether the kernel repeats itself."""
    only: Collection[str] | None = None
    """The blocks to compare; None for all."""
    widen: bool = False
    """True to add a second row to inputs of one sample: a kernel that mixes rows up is right for one."""


def blocks_of(model: nn.Module) -> list[str]:
    """Return the modules that together are called for all of the model: its repeated blocks, and what stands beside
    them.
    """
    lists = {name for name, module in model.named_modules() if _repeats(module)}
    around = {name.rsplit(".", k)[0] for name in lists for k in range(1, name.count(".") + 1)}
    names: list[str] = []
    for name, _ in model.named_modules():
        is_part = names and name.startswith(f"{names[-1]}.")
        if name and name not in lists and name not in around and not is_part:
            names.append(name)
        elif name.rpartition(".")[0] in lists and not is_part:
            names.append(name)  # that it has lists of its own is its own affair
    return names or [""]


def _repeats(module: nn.Module) -> bool:
    """Return True if the module lists blocks: modules of one class, made of modules."""
    if not isinstance(module, nn.ModuleList) or not len(module):
        return False
    return len({type(block) for block in module}) == 1 and any(True for _ in module[0].children())


@contextmanager
def noting_inputs(model: nn.Module) -> Iterator[Learning]:
    """Note, during a training forward pass within, which inputs of which blocks learn."""
    noted: Learning = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            noted.setdefault(name, tuple(x.requires_grad for x in floats((args, kwargs))))

        return hook

    with ExitStack() as hooks:
        for name in blocks_of(model):
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(note(name), with_kwargs=True))
        yield noted


@dataclass
class BlockComparison:
    """Compares one switch on and off in every block that a forward pass reaches; `found` has what differed, in
    order.
    """

    model: nn.Module
    switch: Switch
    others: Sequence[Switch]
    """Switches that are off all the time."""
    not_in_fp32: Sequence[Switch]
    """Switches that have no fp32, and are off where that is computed."""
    how: How
    inside: str | None = None
    """The one block to look into, instead of all: what its modules return is compared too."""
    coverage: Coverage = field(default_factory=Coverage)
    differences: list[Apart] = field(default_factory=list)

    def run(self, forward: Callable[[], Any]) -> None:
        """Go through the model once, by its stock code."""
        names = [self.inside] if self.inside is not None else blocks_of(self.model)
        names = [name for name in names if self.how.only is None or name in self.how.only]
        # All blocks together make `passes`; one pass alone has nothing to be compared with.
        self._repeats = max(2, math.ceil(self.how.passes / max(1, sum(map(is_repeated, names)))))
        self._busy, self._seen = False, set[str]()
        with ExitStack() as stack:
            for switch in self.others:
                stack.enter_context(switch.off())
            # The pass is stock code's: a wrong kernel must not spoil the inputs of the blocks after it.
            self._off = stack.enter_context(ExitStack())
            self._off.enter_context(self.switch.off())
            for name in names:
                module = self.model.get_submodule(name)
                hook = self._hook(name)
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            with torch.no_grad():
                forward()

    @contextmanager
    def _kernel_on(self) -> Iterator[None]:
        """Leave the switch on within; the stock code runs around it."""
        self._off.close()
        try:
            yield
        finally:
            self._off.enter_context(self.switch.off())

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            # A comparison calls the block itself, and so this hook.
            if self._busy or name in self._seen:
                return
            # A block that is called more than once is compared at its first call.
            self._seen.add(name)
            self._busy = True
            try:
                with _as_alone(self.model, block):
                    self._compare_call(name, block, args, kwargs)
            except torch.OutOfMemoryError:
                self.coverage.missed[name] = "there was no memory for it"
            finally:
                self._busy = False

        return hook

    def _compare_call(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if self.how.widen:
            try:
                self._compare(self._call(name, block, args, kwargs, widen=True))
                return
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):  # the first dimension is no sample's there
                pass
        self._compare(self._call(name, block, args, kwargs))

    def _call(
        self, name: str, block: nn.Module, args: Any, kwargs: Any, *, widen: bool = False
    ) -> BlockCall:
        inside_of = self.model if self.inside is not None else None
        learning = (self.how.learning or {}).get(name, ())
        return BlockCall(name, block, args, kwargs, learning, inside_of=inside_of, widen=widen)

    def _compare(self, block: BlockCall) -> None:
        # Backends such as flash attention have no fp32 to be compared in.
        in_halves = block.is_half and self.switch.cause != "attention_backend"
        wrong, exact = None, None
        if in_halves:
            try:
                wrong, exact = self._in_fp32(block)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the stock code may insist on a dtype
                if block.widened:
                    raise
                reason = str(error).partition("\n")[0]
                self.coverage.missed[block.name] = f"it does not run in fp32: {reason}"
                return
        expected, fused = self._both(block, wide=False)
        dtype = block.dtype if block.is_half else torch.float32
        with torch.no_grad():
            # NaN is like nothing: of stock code that gives it, nothing can be told.
            if not all(torch.isfinite(x).all() for x in expected.values()) and not in_halves:
                self.coverage.missed[block.name] = "its stock values are not finite"
                return
            wrong = wrong or self._differs(block, expected, fused, dtype, exact)
        del exact
        self.coverage.compared.add(block.name)
        unsteady = self._unsteady(block, expected, fused) if self.inside is None else None
        if unsteady is not None:
            self.differences.append(Apart(block.name, unsteady, repeats=False))
        elif wrong is not None:
            self.differences.append(Apart(*wrong, repeats=True))

    def _in_fp32(self, block: BlockCall) -> tuple[tuple[str, float] | None, Values]:
        """Return where it differs in fp32, if anywhere, and the stock code's values."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(block.device.type, enabled=False))
            if any(True for _ in block.module.parameters()):
                stack.enter_context(in_fp32(block.module))
            for switch in self.not_in_fp32:
                stack.enter_context(switch.off())
            expected, fused = self._both(block, wide=True)
            return self._differs(block, expected, fused, torch.float32), expected

    def _both(self, block: BlockCall, *, wide: bool) -> tuple[Values, Values]:
        expected = block.values(wide=wide)
        with self._kernel_on():
            return expected, block.values(wide=wide)

    def _differs(
        self,
        block: BlockCall,
        expected: Values,
        fused: Values,
        dtype: torch.dtype,
        exact: Values | None = None,
    ) -> tuple[str, float] | None:
        # What a block adds to its input is within rounding in half precision.
        inputs = block.inputs if dtype is torch.float32 else ()
        limits = BLOCK[dtype] if dtype is torch.float32 else BLOCK[dtype].wider(self.switch.error)
        return first_apart(expected, fused, limits, inputs, exact)

    def _unsteady(self, block: BlockCall, expected: Values, fused: Values) -> float | None:
        """Return how far the kernel is from itself on equal inputs, if that is more than the stock code is."""
        allowed = 0.0
        if block.device.type == "cuda":  # where backends of PyTorch may sum in any order
            allowed = _OF_STOCK * apart(expected, block.values(wide=False))
            if self.not_in_fp32 or self.switch.cause == "attention_backend":
                # Flash attention's backward sums in any order; the stock code's may be another.
                allowed = max(allowed, _OF_BACKEND)
        times = self._repeats if is_repeated(block.name) else 2
        with self._kernel_on():
            # All of them, whatever is found: ranks that share a sample go through a block together.
            error = max(apart(fused, block.values(wide=False)) for _ in range(times - 1))
        return error if error > allowed else None


def is_repeated(block: str) -> bool:
    """Return True if the block is one of a list."""
    return block.rpartition(".")[2].isdigit()


@contextmanager
def _as_alone(model: nn.Module, block: nn.Module) -> Iterator[None]:
    """Let the block be called by itself within: its weights are whole and stay so, and casts are made anew."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()  # of a pass without gradients, casts of adapters have none
    try:
        with gathered_here(block):
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps)
        torch.clear_autocast_cache()
