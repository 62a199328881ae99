"""Share recorded calls among the ranks of sharded models: no rank can run such a model without the others."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.samples.tensors import map_tensors
from dit_lora.numerics.finite import is_finite
from dit_lora.numerics.ranks import gather_object, get_process_index, is_true_on_any_rank


@dataclass(frozen=True)
class RankCalls:
    """The recorded model calls of one rank in a failed step."""

    rank: int
    calls: Sequence[CapturedCall]
    controls: Mapping[int, CapturedCall]
    """The last healthy call of each model, by the model's id."""


def gather_rank_calls(
    calls: Sequence[CapturedCall],
    controls: Mapping[int, CapturedCall],
    models: Sequence[nn.Module],
    device: torch.device,
) -> list[RankCalls] | None:
    """Gather the recorded model calls of ranks with a non-finite value, or of all ranks if none has one. Collective.

    The result is equal on all ranks. None if an argument of a call cannot be sent to another rank.
    """
    # Models are not sent: each rank has its own, at the same position of this list.
    model_numbers = {id(model): number for number, model in enumerate(models)}
    bad = {
        call.micro_step
        for call in calls
        for tensor in (*call.outputs, *call.output_gradients)
        if tensor is not None and not is_finite(tensor)
    }
    selected = list(calls)
    if is_true_on_any_rank(bool(bad)):
        selected = [call for call in calls if call.micro_step in bad]
    # Send a control only for a model that has a selected call.
    healthy_calls = [controls[id(call.owner)] for call in selected if id(call.owner) in controls]
    try:
        packed = pickle.dumps(
            [[_copy_call_to_cpu(call, model_numbers) for call in part] for part in (selected, healthy_calls)]
        )
    except (AttributeError, TypeError, pickle.PicklingError):
        # This rank has to take part in the gather all the same.
        packed = None
    gathered = gather_object([(get_process_index(), packed)])
    contents = {rank: content for rank, content in gathered if content is not None}
    # All ranks see this, so all of them give up together.
    if len(contents) < len(gathered):
        return None
    all_rank_calls = []
    for rank, content in contents.items():
        # Unpickling is safe here: the ranks of this run have written it.
        rank_selected, packed_controls = pickle.loads(content)
        rank_calls = [_move_call_to_local_model(call, number, models, device) for call, number in rank_selected]
        rank_controls = [_move_call_to_local_model(call, number, models, device) for call, number in packed_controls]
        if rank_calls:
            controls_by_model = {id(call.owner): call for call in rank_controls}
            all_rank_calls.append(RankCalls(rank, rank_calls, controls_by_model))
    return all_rank_calls


def _copy_call_to_cpu(call: CapturedCall, numbers: Mapping[int, int]) -> tuple[CapturedCall, int]:
    """Copy a recorded call to the CPU for other ranks.

    The model, which every rank has, and the loop's generators are left out.
    """
    cpu_call = _move_to_device(call, torch.device("cpu"))
    return replace(cpu_call, owner=None, generator=None, tensor_versions=(), graph_ref=None), numbers[id(call.owner)]


def _move_call_to_local_model(
    call: CapturedCall, number: int, models: Sequence[nn.Module], device: torch.device
) -> CapturedCall:
    return replace(_move_to_device(call, device), owner=models[number])


def _move_to_device(call: CapturedCall, device: torch.device) -> CapturedCall:
    args, kwargs, outputs, gradients = map_tensors(
        lambda tensor: tensor.to(device), (call.args, call.kwargs, call.outputs, call.output_gradients)
    )
    return replace(call, args=args, kwargs=kwargs, outputs=outputs, output_gradients=gradients)
