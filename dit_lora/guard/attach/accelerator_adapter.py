"""What the guard needs from the loop's launcher: device, ranks and prepared objects, with or without Accelerate."""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from dit_lora.errors import DitLoraError
from dit_lora.guard.finite_gate import ACCELERATED
from dit_lora.numerics.ranks import act_as_single_process, gather_object, get_num_processes, get_process_index
from dit_lora.patching import is_instance_of
from dit_lora.terminal import echo

if TYPE_CHECKING:  # the guard needs only torch
    from accelerate import Accelerator

_LOG = logging.getLogger("dit_lora")
T = TypeVar("T")


class LoopProcessContext:
    """Device, process group and Accelerate objects of a guarded training loop.

    `accelerator` is None in plain PyTorch.
    """

    def __init__(self, accelerator: "Accelerator | None", device: torch.device) -> None:
        if accelerator is not None and not is_instance_of(accelerator, "accelerate:Accelerator"):
            raise DitLoraError(
                "Guard.attach: the first argument must be an accelerate.Accelerator, or None for a loop in plain "
                f"PyTorch; got {type(accelerator).__name__}"
            )
        self.accelerator = accelerator
        self._rank = get_process_index()
        self.device = accelerator.device if accelerator is not None else device
        self.is_shared = False
        """True if ranks train one model together, so that they must agree on each step."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks that must agree on each step; 1 once the loop has destroyed its process group."""
        return get_num_processes() if self.is_shared else 1

    def detect_distributed_training(self, parameters: Sequence[nn.Parameter]) -> None:
        """Find out whether the ranks train these parameters together: by DDP, sharded, or under Accelerate.

        Processes that each train a separate model need not agree: one may skip a step that the others take.
        """
        if self.is_shared or get_num_processes() == 1:
            return
        is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        # Processes of one Accelerator train one model together.
        accelerated = self.accelerator is not None and self.accelerator.num_processes > 1
        self.is_shared = is_sharded or accelerated
        if self.is_shared:
            return
        # DDP, FSDP and DeepSpeed keep no registry, so search all objects for a module that holds these parameters.
        parameter_ids = {id(parameter) for parameter in parameters}
        for candidate in gc.get_objects():
            kind = type(candidate)
            # Check the type, not isinstance: proxy objects may run code when asked for their class.
            if kind.__name__ in _SHARED_MODEL_CLASSES and issubclass(kind, nn.Module):
                self.is_shared = any(id(parameter) in parameter_ids for parameter in candidate.parameters())
                return

    @property
    def process_rank(self) -> int:
        """Rank of this process in the process group."""
        # The loop may destroy its process group before the guard logs its last message.
        self._rank = max(self._rank, get_process_index())
        return self._rank

    @property
    def rank(self) -> int:
        """Rank of this process among those that train one model; 0 if it trains a separate model."""
        return self.process_rank if self.is_shared else 0

    @property
    def is_independent(self) -> bool:
        """True if there are other processes, and nothing such as DDP shows that they train the same model."""
        return not self.is_shared and get_num_processes() > 1

    @contextmanager
    def use_training_process_group(self) -> Iterator[None]:
        """Inside the context, collective calls reach the ranks that train one model, and no other process."""
        if self.is_shared:
            yield
        else:
            with act_as_single_process():
                yield

    def get_process_folder(self, folder: Path) -> Path:
        """The folder that this process writes to: a subfolder if each process trains a separate model."""
        return folder if self.is_shared or not self.process_rank else folder / f"process_{self.process_rank}"

    def log(self, message: str) -> None:
        """Log a warning that begins with "guard: ". If ranks train one model together, only rank 0 logs."""
        if self.rank != 0:
            return
        if not self.is_shared and self.process_rank:
            message = message.replace("guard: ", f"guard: process {self.process_rank}: ", 1)
        if _LOG.manager.disable >= logging.WARNING:  # a trainer has silenced the whole process
            echo(message, err=True)
        else:
            _LOG.warning("%s", message)

    @property
    def syncs_gradients(self) -> bool:
        """True if the current backward is the last one before an optimizer step (Accelerate).

        Always true in a plain loop.
        """
        return self.accelerator is None or self.accelerator.sync_gradients

    @property
    def is_step_due(self) -> bool:
        """True if the loop calls `optimizer.step` itself after the current backward; False under DeepSpeed.

        It is also false for all but the last backward of gradient accumulation.
        """
        return self.syncs_gradients and not self.uses_deepspeed

    @property
    def scaler(self) -> Any | None:
        """Accelerate's gradient scaler; None in a plain loop, whose scaler itself skips the optimizer."""
        return self.accelerator.scaler if self.accelerator is not None else None

    @property
    def uses_deepspeed(self) -> bool:
        # Accelerate's DistributedType is a string enum.
        return self.accelerator is not None and self.accelerator.distributed_type == "DEEPSPEED"

    @property
    def folder(self) -> Path:
        """Default output folder of a guarded loop: Accelerate's `project_dir`, or `dit_lora_guard` without one."""
        # `project_dir` is None unless the script has set it.
        project = self.accelerator.project_dir if self.accelerator is not None else None
        return Path(project) if project is not None else Path("dit_lora_guard")

    def unwrap_models(self, named_models: Sequence[nn.Module]) -> list[nn.Module]:
        """Unwrap the `named_models` models and those that Accelerate has prepared, and return each once."""
        prepared = self.accelerator._models if self.accelerator is not None else []
        unwrapped = [unwrap_model(model) for model in [*named_models, *prepared]]
        # By id, since a model may be both named and prepared.
        return list({id(model): model for model in unwrapped}.values())

    def find_prepared_optimizer(self, optimizer: Any) -> Any:
        """Accelerate's wrapper of an optimizer, which the loop steps; without Accelerate the optimizer itself."""
        wrappers = self.accelerator._optimizers if self.accelerator is not None else []
        # The loop calls the wrapper's `step`, so that method has to be watched.
        return next((wrapper for wrapper in wrappers if wrapper.optimizer is optimizer), optimizer)

    def sum_flags(self, flags: torch.Tensor) -> list[float]:
        """Sum flags over ranks and read them from the device once. Collective."""
        if self.num_ranks > 1:
            # all_reduce sums by default.
            distributed.all_reduce(flags)
        return flags.tolist()

    def is_true_on_any_rank(self, flag: bool | torch.Tensor) -> bool:
        return bool(self.sum_flags(torch.as_tensor(flag, device=self.device).float().reshape(1))[0])

    def gather_objects(self, objects: Sequence[T]) -> list[T]:
        """Gather the objects of all ranks, in rank order. Collective."""
        with self.use_training_process_group():
            return gather_object(list(objects))


_SHARED_MODEL_CLASSES = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
_WRAPPER_CLASSES = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Unwrap a model from DDP, FSDP or DeepSpeed; `torch.compile` and Accelerate's autocast stay in place."""
    # Wrappers may be nested.
    while any(is_instance_of(model, f"{module}:{name}") for module, name in _WRAPPER_CLASSES):
        model = model.module  # type: ignore[assignment]
    return model


def unwrap_optimizer(optimizer: Any) -> Any:
    """Unwrap an optimizer from Accelerate's wrapper."""
    return optimizer.optimizer if is_instance_of(optimizer, ACCELERATED) else optimizer


def has_found_infinity(scaler: Any, optimizer: Any) -> bool:
    """True if a gradient scaler found an infinite gradient, even if a fused optimizer reads its flag on the device."""
    # A disabled scaler has no per-optimizer state.
    state = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return any(bool(flag) for flag in state.get("found_inf_per_device", {}).values())
