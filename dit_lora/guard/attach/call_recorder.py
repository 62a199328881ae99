"""Calls of a model, kept so that they can be run again: for loops that are not ours.

What is kept is what the model was given, the state of the random generators, and the gradient that the loss sent
back. Running the model on these gives the same activations and gradients without knowing the loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dit_lora.guard.replay import MicroBatch
from dit_lora.numerics.autocasts import Autocasts, open_autocasts, opened_again
from dit_lora.numerics.finite import is_finite
from dit_lora.numerics.objectives import LossOutput

OUTPUT_GRADIENT = "gradient of the output"


@dataclass
class CapturedCall:
    """One forward of the model, and the gradient that came back to its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ids: tuple[str, ...]
    """Names of the samples; by number where nobody named them."""
    random_state: torch.Tensor
    cuda_random_state: torch.Tensor | None
    generator: tuple[torch.Generator, torch.Tensor] | None = None
    """The loop's own generator and the state it was in."""
    output: torch.Tensor | None = None
    output_gradient: torch.Tensor | None = None
    owner: nn.Module | None = None
    """The model that was called."""
    autocasts: Autocasts = ()
    """Autocast that the loop had around the call."""
    micro_step: int = 0
    """Number of the micro-batch, from 0: a model that is called again begins the next."""

    @property
    def batch_size(self) -> int:
        return len(self.ids)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that have a row for each sample, by argument name."""
        named = {f"argument {i}": arg for i, arg in enumerate(self.args)} | self.kwargs
        rows = {n: t for n, t in named.items() if _has_rows(t, self.batch_size)}
        gradient = self.output_gradient
        # What came back to a bad output is bad by that; to a good one, by the loss or its target.
        if gradient is not None and self.output_is_finite and _has_rows(gradient, self.batch_size):
            rows[OUTPUT_GRADIENT] = gradient
        return rows

    @property
    def output_is_finite(self) -> bool:
        return self.output is not None and is_finite(self.output)

    def single(self, index: int) -> "CapturedCall":
        """Return the call of one sample."""

        def row(value: Any) -> Any:
            return value[index : index + 1] if _has_rows(value, self.batch_size) else value

        args, kwargs = tree_map(row, (self.args, self.kwargs))
        return replace(
            self,
            args=args,
            kwargs=kwargs,
            ids=(self.ids[index],),
            output=row(self.output),
            output_gradient=row(self.output_gradient),
        )

    def run(self, model: nn.Module) -> LossOutput:
        """Run the call again; return per-sample sums of output times its recorded gradient, whose backward is the
        recorded one.
        """
        # Dropout in the model draws from these: the same masks need the same state.
        torch.set_rng_state(self.random_state)
        if self.cuda_random_state is not None:
            torch.cuda.set_rng_state(self.cuda_random_state)
        with self._generator_as_it_was(), opened_again(self.autocasts):
            output = main_output(model(*self.args, **self.kwargs))
        assert output is not None  # the recorded call had one
        gradient = self.output_gradient
        # The gradient that came back to a bad output is bad whatever the model does now.
        usable = gradient if self.output_is_finite else None
        weighted = output.float() if usable is None else output.float() * usable.float()
        losses = weighted.reshape(len(weighted), -1).sum(1) if weighted.ndim else weighted[None]
        # A model that returns one loss, as Transformers' do, has as many samples all the same.
        return LossOutput(losses, self._timesteps(max(len(losses), self.batch_size)))

    @contextmanager
    def _generator_as_it_was(self) -> Iterator[None]:
        """Put the loop's generator into the state of the call within; afterwards it is where the loop has it."""
        if self.generator is None:
            yield
            return
        generator, state = self.generator
        now = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(now)

    def micro_batch(
        self,
        model: nn.Module,
        *,
        step: int,
        micro_step: int,
        rank: int,
        place: "CapturedCall | None" = None,
    ) -> MicroBatch:
        """Return the call as a micro-batch that can be run again; `place` is the one that failed in a step.

        Another call is run at its place with its random state, as dropout has it; a call's noise is the loop's own,
        and cannot be drawn again.
        """

        def of(call: CapturedCall) -> MicroBatch:
            return call.micro_batch(model, step=step, micro_step=micro_step, rank=rank, place=place)

        def at(other: MicroBatch, _draws: bool) -> MicroBatch:
            if place is None or (other.step, other.micro_step) == (step, micro_step):
                return of(self)
            random = replace(
                self,
                random_state=place.random_state,
                cuda_random_state=place.cuda_random_state,
                generator=place.generator,
            )
            return of(random)

        return MicroBatch(
            ids=self.ids,
            step=step,
            micro_step=micro_step,
            rank=rank,
            tensors=self.tensors(),
            forward=lambda: self.run(model),
            single=lambda index: of(self.single(index)),
            loss_is_sum=True,
            autocasts=bool(self.autocasts),
            at=at,
        )

    def _timesteps(self, count: int) -> torch.Tensor:
        """Return the call's `timestep` (Diffusers' name), one a sample; -1 for a model that has none."""
        timesteps = self.kwargs.get("timestep")
        if isinstance(timesteps, torch.Tensor) and timesteps.numel() == count:
            return timesteps.detach().flatten()
        return torch.full((count,), -1)


@dataclass
class Recorder:
    """Captures every training call of `model` until `calls` is cleared."""

    model: nn.Module
    ids: Callable[[int, int], tuple[str, ...]]
    """(number of the micro-batch, samples in it) to the samples' names."""
    calls: list[CapturedCall] = field(default_factory=list)
    """Calls in the order in which they were made; recorders of several models may share the list."""
    generator: torch.Generator | None = None
    sees: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None
    """Called with the tensors of a call, before its samples' names are asked for."""
    begins: Callable[[], None] = lambda: None
    """Called before the model runs."""
    ends: Callable[[], None] = lambda: None
    """Called when the model has run."""
    has_gradient: bool = False
    """True once a gradient came back to an output."""
    _open: list[CapturedCall | None] = field(default_factory=list)
    _handles: list[Any] = field(default_factory=list)

    def start(self) -> None:
        self._handles = [
            self.model.register_forward_pre_hook(self.before, with_kwargs=True),
            self.model.register_forward_hook(self._after),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def drop(self) -> None:
        """Stop, and forget the model's calls."""
        self.stop()
        self.calls[:] = [call for call in self.calls if call.owner is not self.model]

    def out_of_range(self) -> list[str]:
        """Return samples of the last call whose integers no embedding table of the model has, in words."""
        if not self.calls:
            return []
        call = self.calls[-1]
        tables = {
            name: table.num_embeddings
            for name, table in self.model.named_modules()
            if isinstance(table, nn.Embedding)
        }
        integers = {n: t for n, t in call.tensors().items() if not t.is_floating_point()}
        return [
            f"{call.ids[row]}: {name} has {int(values.max())}, {table} has 0..{size - 1}"
            for name, tensor in integers.items()
            for table, size in tables.items()
            for row, values in enumerate(tensor)
            if int(values.max()) >= size
        ]

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call; hooks call it before the model runs."""
        if not is_recorded():
            return
        if is_redirected(self.model):
            self._open.append(None)
            return
        # Detached: what is kept must not hold a graph in memory.
        leaves, tree = tree_flatten((args, dict(kwargs)))
        kept_args, kept_kwargs = tree_unflatten(map(_detached, leaves), tree)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.sees(tensors)
        micro_step = self._micro_step()
        call = CapturedCall(
            kept_args,
            kept_kwargs,
            self.ids(micro_step, _count(tensors)),
            torch.get_rng_state(),
            # Asking CUDA's generator would start CUDA in a loop that runs on the CPU.
            torch.cuda.get_rng_state() if any(t.is_cuda for t in tensors) else None,
            (self.generator, self.generator.get_state()) if self.generator else None,
            owner=self.model,
            autocasts=open_autocasts(tensor.device.type for tensor in tensors),
            micro_step=micro_step,
        )
        self.calls.append(call)
        self._open.append(call)
        self.begins()

    def _micro_step(self) -> int:
        if not self.calls:
            return 0
        # Several models may be called for one micro-batch, each of them once.
        last = self.calls[-1].micro_step
        callers = [call.owner for call in self.calls if call.micro_step == last]
        return last + any(caller is self.model for caller in callers)

    def _after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not is_recorded():
            return
        # Calls may nest: the last that began is the first to end.
        call = self._open.pop()
        if call is None:
            return
        self.ends()
        tensor = main_output(output)
        if tensor is None:  # an output that is no tensor and holds none: there is nothing to replay
            self.calls[:] = [made for made in self.calls if made is not call]
            return
        call.output = tensor.detach()
        if tensor.requires_grad:

            def keep(gradient: torch.Tensor) -> None:
                self.has_gradient = True
                call.output_gradient = gradient.detach()

            # The gradient comes with the loop's own backward, long after this call.
            tensor.register_hook(keep)


def main_output(output: Any) -> torch.Tensor | None:
    """Return the tensor that the loss is made of: the first with a gradient, in a tuple, a ModelOutput or an object."""
    values: Any = output
    if isinstance(output, Mapping):
        values = list(output.values())
    elif not isinstance(output, (torch.Tensor, list, tuple)):
        try:
            values = list(vars(output).values())
        except TypeError:
            return None  # a plain number, say
    tensors = [leaf for leaf in _tensors(values) if leaf.is_floating_point()]
    return next((t for t in tensors if t.requires_grad), tensors[0] if tensors else None)


def is_recorded() -> bool:
    """Return True where a call of a model may be a part of a training step."""
    # Within a backward, checkpointing computes parts of a model again: those are no calls of the loop's.
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def is_redirected(module: nn.Module) -> bool:
    """Return True if what is called is another method, by way of `forward`: Lightning's training step under DDP.

    It is the loop's, with its logs and losses: not to be run again, and the models are called within it.
    """
    forward = vars(module).get("forward")
    return getattr(forward, "__qualname__", "").startswith("_ForwardRedirection.")


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _count(tensors: Sequence[torch.Tensor]) -> int:
    """Return samples in a call: the rows of its first tensor that has any."""
    return next((len(tensor) for tensor in tensors if tensor.ndim), 1)


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
