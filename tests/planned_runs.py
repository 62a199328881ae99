"""Runs of a recipe's model on random samples, whose memory plans are compared with."""

import gc
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile

from dit_lora.config.recipe import Recipe
from dit_lora.numerics.streams import RandomStreams
from dit_lora.planning.subject import MemoryEstimator
from dit_lora.training.execution.activation_checkpointing import (
    CheckpointingMode,
    set_checkpointing,
)
from dit_lora.training.loop import max_resident_micro_batches
from dit_lora.training.optim.build import build_optimizer
from dit_lora.training.tasks.registry import get_task_of_family


class RealRun:
    """The recipe's model with its weights, and steps on random samples."""

    def __init__(
        self,
        recipe: Recipe,
        subject: MemoryEstimator,
        mode: CheckpointingMode,
        device: torch.device,
    ) -> None:
        self.recipe, self.checkpoint = recipe, subject.checkpoint
        self.model, groups, _ = get_task_of_family(recipe.model.family).load_trainable(
            recipe, subject.family, subject.checkpoint, subject.dtype
        )
        self.model.to(device).train()
        if subject.dtype is torch.bfloat16:
            AcceleratorState._reset_state(reset_partial_state=True)
            accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16")
            self.model = accelerator.unwrap_model(accelerator.prepare(self.model))
        set_checkpointing(self.model, mode)
        self.optimizer = build_optimizer(groups, recipe.optim)
        self.size = recipe.train.batch_size
        tensors = {
            name: torch.rand(self.size, *size).to(dtype)
            if dtype.is_floating_point
            else torch.ones((self.size, *size), dtype=dtype)
            for name, (size, dtype) in subject.get_spec(subject.shapes[0]).items()
        } | subject.get_integer_inputs(subject.shapes[0], self.size)
        self.batch = {name: tensor.contiguous().to(device) for name, tensor in tensors.items()}

    def step(self) -> None:
        for _ in range(self.recipe.train.accumulate):
            streams = RandomStreams(0, range(self.size))
            self.checkpoint.losses(self.model, self.batch, streams).losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def held(self) -> int:
        """Bytes between two steps, with the loop's micro-batches; bitsandbytes' tables are shared by all states."""
        state = (t for parameter_state in self.optimizer.state.values() for t in parameter_state.values())
        tensors = (*self.model.parameters(), *self.batch.values(), *state)
        sizes = {t.data_ptr(): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
        batch = sum(tensor.nbytes for tensor in self.batch.values())
        return sum(sizes.values()) + batch * (max_resident_micro_batches(self.recipe.train.accumulate) - 1)

    def peak(self) -> int:
        """Return the peak of the second step, by the CPU allocator's own record of what it gave and took back."""
        self.step()
        gc.collect()  # else what other tests have left may be given back within
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            self.step()
        events: Any = record.profiler
        current_bytes = peak_bytes = 0
        memory_events = [e for e in events.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(memory_events, key=lambda event: event.start_ns()):
            current_bytes += event.nbytes()
            peak_bytes = max(peak_bytes, current_bytes)
        return self.held + peak_bytes
