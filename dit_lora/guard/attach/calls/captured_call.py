"""One recorded model call of a training loop, which can be run again.

The record holds the arguments, the random generator states and the gradient of the output. Running the model on these
gives the same activations and parameter gradients without knowing the loss.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dit_lora.guard.attach.calls.call_rows import (
    Arguments,
    SampleExtractor,
    collect_named_tensors,
    count_samples,
    is_tensor_list,
    make_sample_extractor,
)
from dit_lora.guard.attach.samples.loaded_batches import find_bad_rows
from dit_lora.guard.attach.samples.row_names import format_row_name
from dit_lora.guard.attach.samples.tensors import has_batch_size
from dit_lora.numerics.autocasts import AutocastState, restore_autocasts
from dit_lora.numerics.finite import is_finite
from dit_lora.numerics.objectives import LossOutput


@dataclass
class CapturedCall:
    """A recorded forward call of a model: arguments, random state, outputs, and the gradients of the outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sample_names: tuple[str, ...]
    """Sample names set by the loop; empty if it set none."""
    random_state: torch.Tensor
    cuda_random_state: torch.Tensor | None
    generator: tuple[torch.Generator, torch.Tensor] | None = None
    """The loop's random generator and its state before the call; None if it uses torch's."""
    outputs: tuple[torch.Tensor, ...] = ()
    """The tensor that the loss is computed from; one tensor per sample for a model that returns a list."""
    output_gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of the outputs; None where none has arrived."""
    owner: nn.Module | None = None
    """The model that was called."""
    autocasts: AutocastState = ()
    """Autocast contexts that were active around the call."""
    micro_step: int = 0
    """Number of the micro-batch in its step, from 0. A second call of a model starts the next micro-batch."""
    generation: int = -1
    """The generation of gradients that this call contributed to; -1 before its backward."""
    is_differentiated_twice: bool = False
    """True after a backward with create_graph=True: the gradient is part of another loss."""
    batch_number: int | None = None
    """Number of the call's batch, in the order in which the loop took batches; None if it is not certain."""
    argument_ids: tuple[int, ...] = ()
    """`id()` of each argument object that the loop passed."""
    graph_ref: weakref.ref[Any] | None = None
    """Alive as long as the output's graph; once it is gone, no gradient will arrive."""
    tensor_versions: tuple[tuple[torch.Tensor, int], ...] = ()
    """Argument tensors with their version counters at the time of the call."""

    @property
    def arguments(self) -> Arguments:
        return self.args, self.kwargs

    @property
    def num_samples(self) -> int:
        return count_samples(self.arguments)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of a recorded call's samples: those that the loop has set, else names made from row numbers."""
        count = self.num_samples
        if len(self.sample_names) == count:
            return self.sample_names
        return tuple(format_row_name(row, self.micro_step) for row in range(count))

    def collect_row_tensors(self) -> dict[str, torch.Tensor]:
        """Tensor arguments of a recorded call that have a row for each sample, by name."""
        count = self.num_samples
        return {n: t for n, t in collect_named_tensors(self.arguments).items() if has_batch_size(t, count)}

    @property
    def has_finite_output(self) -> bool:
        return bool(self.outputs) and all(map(is_finite, self.outputs))

    @property
    def has_gradient(self) -> bool:
        return any(gradient is not None for gradient in self.output_gradients)

    @property
    def has_bad_gradient(self) -> bool:
        """True if a gradient of a recorded call's output is not finite, or its square overflows fp32."""
        gradients = [g for g in self.output_gradients if g is not None and g.is_floating_point()]
        return any(bool(find_bad_rows(g.reshape(1, -1))) for g in gradients if g.numel())

    @property
    def bad_gradient_rows(self) -> list[int]:
        """Row numbers of the samples whose output gradient is not finite, or whose square overflows fp32."""
        gradients = self.output_gradients
        # A list of outputs has one tensor per sample.
        if len(gradients) > 1:
            bad = [g is not None and bool(find_bad_rows(g.reshape(1, -1))) for g in gradients]
            return [row for row, is_bad in enumerate(bad) if is_bad]
        return find_bad_rows(gradients[0]) if gradients and gradients[0] is not None and gradients[0].ndim else []

    @property
    def gradient_peak(self) -> float:
        """Largest magnitude of a recorded call's output gradients; 0.0 if there are none."""
        gradients = [g for g in self.output_gradients if g is not None and g.numel()]
        return max((float(g.float().abs().max()) for g in gradients), default=0.0)

    @property
    def can_get_gradient(self) -> bool:
        """True while a recorded call runs, and as long as the autograd graph of its output is alive."""
        if self.graph_ref is None:
            return not self.outputs
        return self.graph_ref() is not None

    @property
    def has_unmodified_arguments(self) -> bool:
        """False if an argument of a recorded call has been overwritten since, so that a replay would prove nothing."""
        return all(tensor._version == version for tensor, version in self.tensor_versions)

    def get_sample_extractor(self) -> SampleExtractor | None:
        """Create an object that extracts single samples from a recorded call; None if samples cannot be told apart."""
        return make_sample_extractor(self.arguments, getattr(self.owner, "config", None))

    def select_sample_row(self, row: int, cutter: SampleExtractor) -> "CapturedCall":
        """Copy a recorded call with only the sample at this row."""
        args, kwargs = cutter.extract_sample_arguments(self.arguments, row)
        return replace(
            self,
            args=args,
            kwargs=kwargs,
            sample_names=(self.ids[row],),
            outputs=cutter.extract_sample_outputs(self.outputs, row),
            output_gradients=list(cutter.extract_sample_outputs(self.output_gradients, row)),
        )

    def compute_replay_losses(self, model: nn.Module) -> LossOutput:
        """Run a recorded call again with its random state.

        Returns per-sample sums of output times recorded gradient, so that their backward repeats the recorded one.
        """
        outputs = self.rerun_model_call(model)
        # The recorded gradient of a bad output is bad, even if the output is finite this time.
        gradients = self.output_gradients if self.has_finite_output else []
        # The derivative of output * gradient is the recorded gradient, so no loss function is needed.
        weighted = [
            output.float()
            if number >= len(gradients) or gradients[number] is None
            else output.float() * gradients[number].float()  # type: ignore[union-attr]
            for number, output in enumerate(outputs)
        ]
        if len(weighted) > 1:
            # (B,): one output tensor per sample.
            losses = torch.stack([product.sum() for product in weighted])
        else:
            output_sum = weighted[0]
            # (B, ...) -> (B,). A scalar output counts as one sample.
            losses = output_sum.reshape(len(output_sum), -1).sum(1) if output_sum.ndim else output_sum[None]
        # A model that returns a single loss, as Transformers' do, may still have several samples.
        count = max(len(losses), self.num_samples)
        timesteps = self.kwargs.get("timestep")  # Diffusers' name
        if isinstance(timesteps, torch.Tensor) and timesteps.numel() == count:
            return LossOutput(losses, timesteps.detach().flatten())
        return LossOutput(losses, torch.full((count,), -1))

    def rerun_model_call(self, model: nn.Module) -> list[torch.Tensor]:
        """Run a recorded call again with its random state; returns the outputs that the loss is computed from."""
        # Dropout draws from these generators, so the same masks need the same state.
        torch.set_rng_state(self.random_state)
        if self.cuda_random_state is not None:
            torch.cuda.set_rng_state(self.cuda_random_state)
        with self._use_recorded_rng_state(), restore_autocasts(self.autocasts):
            return find_main_outputs(model(*self.args, **self.kwargs))

    @contextmanager
    def _use_recorded_rng_state(self) -> Iterator[None]:
        """Set the loop's random generator to its state at a recorded call, and restore its current state on exit."""
        if self.generator is None:
            yield
            return
        generator, state = self.generator
        current_state = generator.get_state()
        generator.set_state(state)
        try:
            yield
        finally:
            generator.set_state(current_state)


def find_main_outputs(output: Any) -> list[torch.Tensor]:
    """The tensors of a model's output that the loss is computed from.

    These are the first tensor with a gradient in a tuple, a ModelOutput or an object. If that tensor is in a list of
    tensors, as Z-Image returns one per sample, they are the whole list.
    """
    if isinstance(output, torch.Tensor):
        return [output] if _is_differentiable(output) else []
    values: Any = output
    if isinstance(output, Mapping):
        values = list(output.values())
    elif not isinstance(output, (list, tuple)):
        try:
            values = list(vars(output).values())
        except TypeError:
            return []  # a plain number, say
    if is_tensor_list(output) and all(map(_is_differentiable, output)):
        return list(output)
    for value in values:
        if is_tensor_list(value) and any(tensor.requires_grad for tensor in value):
            return list(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            break
    floats = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    floats = [tensor for tensor in floats if _is_differentiable(tensor)]
    return [next((t for t in floats if t.requires_grad), floats[0])] if floats else []


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
