"""DeepSpeed's ZeRO-2: each rank holds its part of the gradients and of the optimizer's state, and all of the weights.

DeepSpeed spreads and gathers. The step is this package's, as under DDP: its clipping, its gate, its autocast.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dit_lora.fuse.gradient_norms import Norms
from dit_lora.numerics.parameters import trainable_state
from dit_lora.training.distributed.engine import Engine, Tensors
from dit_lora.training.optim.build import gradient_norms
from dit_lora.training.optim.state import named_parameters

_BUCKET = 50_000_000
"""Elements of the largest bucket in which gradients wait to be averaged; DeepSpeed's own default is 2 GB of them."""


def import_deepspeed(device: str) -> Any:
    """Return the module `deepspeed`, quiet and compiling nothing."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # else it looks for one, and says so
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r".*all_gather_into_tensor", FutureWarning)  # of its calls
    # On a CPU it would compile a collective over shared memory for a minute: gloo's serves.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@dataclass(frozen=True)
class _Part:
    """The share of one group that this rank's optimizer holds."""

    tensor: torch.Tensor
    """The weights, flat, with their gradient. All ranks' parts in order are the group's parameters, then padding."""
    first: int
    """Index in the whole group of this part's first element."""
    parameters: Mapping[str, nn.Parameter]
    """The group's parameters by `<group>/<parameter>`, in the order in which they are laid flat."""

    def places(self) -> dict[str, slice]:
        """Return where each parameter lies in the whole group."""
        places, end = {}, 0
        for name, parameter in self.parameters.items():
            places[name] = slice(end, end + parameter.numel())
            end += parameter.numel()
        return places

    def own_places(self) -> dict[str, slice]:
        """Return where each parameter lies in this part, for those of which the part holds anything."""
        last = self.first + self.tensor.numel()
        return {
            name: slice(max(one.start, self.first) - self.first, min(one.stop, last) - self.first)
            for name, one in self.places().items()
            if one.start < last and one.stop > self.first
        }


class Zero2(Engine):
    """Spreads gradients and moments with the parts and the collectives of DeepSpeed's ZeRO, and nothing else of it.

    A group's parameters are one flat tensor, of which this rank's optimizer holds a part: fp32 weights, their
    gradient and its moments. The optimizer is elementwise, so that the parts together take the step of whole tensors.
    """

    model: Any
    """DeepSpeed's engine."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        deepspeed = import_deepspeed(accelerator.device.type)
        self.accelerator = accelerator
        self._micro_steps = 0
        parameters = [named_parameters([group]) for group in optimizer.param_groups]
        trained = sum(one.numel() for named in parameters for one in named.values())
        # DeepSpeed allocates the bucket whole: a LoRA needs no 200 MB of it.
        self._bucket = min(_BUCKET, trained)
        # DeepSpeed puts its parts in the place of the groups' parameters; the caller keeps its own.
        optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        # Its forward under autocast, on its device, and nothing else: a model for evaluation is not wrapped.
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
        self.model, self._zero, _, _ = deepspeed.initialize(
            model=prepared, optimizer=optimizer, config=self._config()
        )
        self.optimizer = self._zero.optimizer
        flat = (group["params"][0] for group in self.optimizer.param_groups)
        self._parts = [
            _Part(part, part.numel() * accelerator.process_index, named)
            for part, named in zip(flat, parameters, strict=True)
        ]
        self._disarm()

    def _config(self) -> dict[str, Any]:
        """Return DeepSpeed's config, without precision, clipping, norm or overflow check of its own."""
        return {
            "train_micro_batch_size_per_gpu": 1,  # of no consequence
            "gradient_accumulation_steps": self.accelerator.gradient_accumulation_steps,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 2,
                # Off: the loop clips by group, and the gate decides.
                "compute_grad_norm": False,
                "overlap_comm": False,
                "reduce_bucket_size": self._bucket,
            },
            "timers": {"throughput": {"enabled": False}},
        }

    @property
    def bare(self) -> nn.Module:
        return self.model.module

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the bucket of fp32 gradients: weights are never gathered in a pass."""
        return 4 * self._bucket

    @contextmanager
    def micro_step(self) -> Iterator[None]:
        self._micro_steps += 1
        is_last = self._micro_steps % self.accelerator.gradient_accumulation_steps == 0
        self.model.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        """Average gradients over ranks and part them, in every micro-step: no rank keeps them whole."""
        # ZeRO's constructor hooks the parameters once and for good; here the hooks live for one backward.
        self._zero.create_gradient_handling_hooks()
        try:
            # The engine's and not Accelerate's, which would also step before the gradients can be looked at.
            self.model.backward(loss)
        finally:
            self._disarm()

    def _disarm(self) -> None:
        """Remove DeepSpeed's hooks from the parameters, so that a replay's backward concerns this rank only."""
        for hook in self._zero._grad_acc_hooks:
            hook.remove()
        self._zero._grad_acc_hooks.clear()

    def gradient_norms(self, norms: Norms | None) -> dict[str, torch.Tensor]:
        """Return each group's gradient norm over all ranks' parts, whose squares are added in fp64: none overflows."""
        averaged = self._zero.averaged_gradients
        for index, part in enumerate(self._parts):
            # Where the optimizer and clipping look for it; DeepSpeed's step takes a view of it.
            part.tensor.grad = self._zero.flatten_dense_tensors_aligned(
                averaged[index], part.tensor.numel()
            )
            averaged[index] = [part.tensor.grad]
        own = gradient_norms(self.optimizer.param_groups, norms)
        # The norms are fp64: their squares stay finite where fp32's would overflow.
        squares = torch.stack([*own.values()]).square()
        # Each rank has a part of every group: the squares add up over ranks.
        whole = self.accelerator.reduce(squares, reduction="sum").sqrt()
        return dict(zip(own, whole.unbind(), strict=True))

    def step(self, bad: torch.Tensor) -> None:
        """Take the step unless `bad`, which fused AdamW reads on the device; then gather the weights that it left."""
        # DeepSpeed calls the optimizer itself, so that the flag has to be there already.
        self.optimizer.found_inf = bad
        try:
            self._zero.step()
        finally:
            del self.optimizer.found_inf
        self._zero.zero_grad(set_to_none=True)
        self._micro_steps = 0

    def discard(self) -> None:
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        super().discard()
        self._zero.zero_grad(set_to_none=True)
        for index in self._zero.averaged_gradients:
            self._zero.averaged_gradients[index] = self._zero.all_grad_tensors[index] = None
        # By it a step's first micro-step begins its sums anew, where later ones add to them.
        self._zero.micro_step_id = INITIAL_MICRO_STEP_ID
        self._micro_steps = 0

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's state; `<group>/<parameter>/part` is the optimizer's copy of its part of the weights."""
        parts = {
            f"{name}/part": part.tensor.detach()[place]
            for part in self._parts
            for name, place in part.own_places().items()
        }
        return trainable_state(self.bare) | parts | self.own_moments()

    def own_moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{kind}": flat[place] if flat.ndim else flat
            for part in self._parts
            for name, place in part.own_places().items()
            for kind, flat in self.optimizer.state.get(part.tensor, {}).items()
        }

    def alike(self) -> dict[str, torch.Tensor]:
        """Return the weights alone: the rest is this rank's part."""
        return trainable_state(self.bare)

    def put_numbers(self, state: Tensors) -> None:
        """Do nothing: AdamW keeps no numbers."""

    def forget(self, names: Sequence[str]) -> None:
        """Zero the moments of the groups in which `own_state` gives a tensor one of these names."""
        owners = {_owner(name) for name in names}
        for part in self._parts:
            if owners & part.parameters.keys():
                for value in self.optimizer.state.get(part.tensor, {}).values():
                    value.zero_()

    def moments(self) -> dict[str, torch.Tensor]:
        state = {}
        for part in self._parts:
            for kind, own in self.optimizer.state.get(part.tensor, {}).items():
                # Collective, in the same order of groups and kinds on every rank.
                whole = self.accelerator.gather(own) if own.ndim else own
                for name, place in part.places().items():
                    shape = part.parameters[name].shape
                    state[f"{name}/{kind}"] = whole[place].view(shape) if own.ndim else own.clone()
        return state

    def load(self, weights: Tensors, moments: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in trainable_state(self.bare).items():
                tensor.copy_(weights[name])
        # The optimizer's fp32 parts are copies: without this the first step would undo the load.
        self._zero.refresh_fp32_params()
        for part in self._parts:
            kinds = {name.rpartition("/")[2] for name in moments if _owner(name) in part.parameters}
            self.optimizer.state[part.tensor] = {
                kind: self._own_moment(part, kind, moments) for kind in sorted(kinds)
            }

    def _own_moment(self, part: _Part, kind: str, moments: Tensors) -> torch.Tensor:
        values = {name: moments[f"{name}/{kind}"] for name in part.parameters}
        if kind == "step":  # of the part as a whole: all its parameters have taken the same steps
            return next(iter(values.values())).to(part.tensor.device, copy=True)
        # The flat group is padded to a multiple of the ranks, and a checkpoint holds no padding.
        whole = part.tensor.new_zeros(part.tensor.numel() * self.accelerator.num_processes)
        for name, place in part.places().items():
            whole[place] = values[name].flatten()
        return whole[part.first : part.first + part.tensor.numel()].clone()


def _owner(name: str) -> str:
    return name.rpartition("/")[0]
