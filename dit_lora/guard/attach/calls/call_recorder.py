"""Record the calls of a model in a training loop, so that they can be run again."""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dit_lora.guard.attach.calls.call_log import CallLog
from dit_lora.guard.attach.calls.captured_call import CapturedCall, find_main_outputs
from dit_lora.guard.attach.containment import try_or_warn
from dit_lora.guard.attach.interception import exclude_from_dynamo, run_uncompiled
from dit_lora.guard.attach.samples.tensors import map_tensors
from dit_lora.numerics.autocasts import AutocastState, get_enabled_autocasts

_LOG = logging.getLogger("dit_lora")


@dataclass
class ModelCallRecorder:
    """Records every training call of one model in a log, with its output and the gradient of its output."""

    model: nn.Module
    log: CallLog
    is_paused: bool = False
    is_open: bool = False
    """True while a call of the model is under way."""
    has_gradient: bool = False
    """True once a gradient came back to an output."""
    _has_warned: bool = False

    def run_and_record_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replacement of the model's `__call__`, which runs the original and records training calls."""
        # Replays and calls inside a call of this model are not the loop's own.
        if (
            self.is_paused
            or self.is_open
            or run_uncompiled(lambda: not is_training_call() or has_redirected_forward(self.model))
        ):
            return original(*args, **kwargs)
        call = run_uncompiled(
            lambda: try_or_warn(lambda: self.record_call_start(args, kwargs), "recording a model's call")
        )
        self.is_open = True
        try:
            output = original(*args, **kwargs)
        finally:
            self.is_open = False
        if call is not None:
            run_uncompiled(
                lambda: try_or_warn(lambda: self.record_call_output(call, output), "recording a model's output")
            )
        return output

    exclude_from_dynamo(run_and_record_call)

    def record_call_start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedCall:
        """Record a model call's arguments and random state, before the model runs."""
        log = self.log
        log.drop_stale_calls()
        versions: list[tuple[torch.Tensor, int]] = []

        # Detach the recorded tensors, so that they do not keep an autograd graph in memory.
        def detach(tensor: torch.Tensor) -> torch.Tensor:
            detached = tensor.detach()
            # The version counter is shared with the original, so it shows later in-place writes.
            versions.append((detached, detached._version))
            return detached

        detached_args = tuple([detach(a) if type(a) is torch.Tensor else map_tensors(detach, a) for a in args])
        detached_kwargs = {name: map_tensors(detach, value) for name, value in kwargs.items()} if kwargs else {}
        has_cuda = any(tensor.is_cuda for tensor, _ in versions)
        autocasts: AutocastState = ()
        # Autocast on the CPU, or on the accelerator that the arguments are on.
        if torch.is_autocast_enabled("cpu") or (has_cuda and torch.is_autocast_enabled("cuda")):
            autocasts = get_enabled_autocasts(["cpu", "cuda"] if has_cuda else ["cpu"])
        micro_step = 0
        if log.calls:
            # Several models may be called once each for one micro-batch; a second call of a model starts the next.
            newest = log.calls[-1].micro_step
            owners = [call.owner for call in log.calls if call.micro_step == newest]
            micro_step = newest + any(owner is self.model for owner in owners)
        call = CapturedCall(
            detached_args,
            detached_kwargs,
            log.sample_names,
            torch.get_rng_state(),
            # Reading CUDA's generator state would initialize CUDA in a CPU loop.
            torch.cuda.get_rng_state() if has_cuda else None,
            (log.generator, log.generator.get_state()) if log.generator else None,
            owner=self.model,
            autocasts=autocasts,
            micro_step=micro_step,
            batch_number=log.get_batch_number(),
            argument_ids=(*map(id, args), *map(id, kwargs.values())),
            tensor_versions=tuple(versions),
        )
        log.begin_call(call)
        if call.sample_names and not self._has_warned and len(call.sample_names) != call.num_samples:
            self._has_warned = True
            num_ids, num_rows = len(call.sample_names), call.num_samples
            _LOG.warning("guard.microbatch: %d ids for %d rows; rows are numbered", num_ids, num_rows)
        return call

    def record_call_output(self, call: CapturedCall, output: Any) -> None:
        """Add the model's output to a recorded call, and hooks that record the output's gradients."""
        self.log.end_call(output)
        tensors = find_main_outputs(output)
        if not tensors:  # no tensor in the output: there is nothing to replay
            self.log.drop_call(call)
            return
        call.outputs = tuple([tensor.detach() for tensor in tensors])
        call.output_gradients = [None] * len(tensors)
        # A weak reference, so that a graph which the loop keeps alive does not keep the call alive.
        ref = weakref.ref(call)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                hook = _GradientHook(self, ref, number)
                # The gradient arrives in the loop's backward, long after this call.
                tensor.register_hook(hook)
                call.graph_ref = weakref.ref(hook)

    @property
    def can_get_gradient(self) -> bool:
        """True while an autograd graph of one of the model's outputs is alive, so that a gradient can still arrive."""
        return any(call.can_get_gradient for call in self.log.calls if call.owner is self.model)

    def drop_calls(self) -> None:
        # Change the list in place: the log holds the same object.
        self.log.calls[:] = [call for call in self.log.calls if call.owner is not self.model]

    def find_out_of_range_ids(self) -> list[str]:
        """Describe the samples of the last call whose token ids exceed every embedding table that they might index."""
        if not self.log.calls:
            return []
        call = self.log.calls[-1]
        # Table sizes by the embedding's name.
        tables = {
            name: table.num_embeddings for name, table in self.model.named_modules() if isinstance(table, nn.Embedding)
        }
        # Any integer argument may hold token ids; the tables do not say which.
        integers = {n: t for n, t in call.collect_row_tensors().items() if not t.is_floating_point()}
        return [
            f"{call.ids[row]}: {name} has {int(values.max())}, {table} has 0..{size - 1}"
            for name, tensor in integers.items()
            for table, size in tables.items()
            for row, values in enumerate(tensor)
            if int(values.max()) >= size
        ]


class _GradientHook:
    """Autograd hook that records the gradient of one output of a model call.

    It lives as long as the output's graph.
    """

    def __init__(self, recorder: ModelCallRecorder, call: "weakref.ref[CapturedCall]", number: int) -> None:
        self._recorder = recorder
        self._call = call
        self._number = number

    def __call__(self, gradient: torch.Tensor) -> None:
        call = self._call()
        if call is None or not call.output_gradients:
            return
        self._recorder.has_gradient = True
        generation = self._recorder.log.generation
        # Grad mode is on during a backward only with create_graph=True, when gradients are differentiated again.
        call.is_differentiated_twice |= torch.is_grad_enabled()
        gradient, earlier = gradient.detach(), call.output_gradients[self._number]
        if call.generation == generation and earlier is not None:
            gradient = earlier + gradient  # a second loss of the same output
        call.output_gradients[self._number] = gradient
        call.generation = generation


def is_training_call() -> bool:
    """True if a model call made now may be part of a training step."""
    # Inside a backward, activation checkpointing recomputes parts of a model: those are not calls of the loop.
    return (
        torch.is_grad_enabled()
        and torch._C._current_graph_task_id() == -1
        and torch._C._get_tracing_state() is None
        # Tensors inside torch.func transforms have no storage, so they cannot be recorded.
        and torch._C._functorch.maybe_current_level() is None
    )


def has_redirected_forward(module: nn.Module) -> bool:
    """True if Lightning has replaced `forward` by its training step under DDP.

    The training step contains the logging and the loss; the models are called inside it.
    """
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__qualname__", "").startswith("_ForwardRedirection.")
