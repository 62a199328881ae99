"""Name the samples of failed rows, where the match is proven."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from dit_lora.guard.attach.calls.call_batch import RecordedCallMicroBatch
from dit_lora.guard.attach.calls.call_rows import (
    SampleExtractor,
    SamplePart,
    collect_named_tensors,
    count_samples,
    iter_sample_parts,
)
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.samples.loaded_batches import LoadedBatches
from dit_lora.guard.attach.samples.row_names import is_item_row
from dit_lora.guard.attach.samples.tensors import map_tensors
from dit_lora.guard.replay import MicroBatch, replay_micro_batch

_MAX_REPLACED = 64


@dataclass
class SampleNamer:
    """Finds names for the samples of a failed model call: matches its rows with items that data loaders returned."""

    batches: LoadedBatches

    def find_sample_name(self, call: CapturedCall, part: SamplePart) -> str | None:
        """Name of the sample that a part of a call belongs to: set by the loop, or a proven dataset index.

        None if unknown.
        """
        # Names that the loop has set need no proof.
        if call.sample_names and part.row is not None and len(call.sample_names) == part.num_parts:
            return call.sample_names[part.row]
        name = self.batches.find_item_name(part.values)
        return name if name is not None else self.batches.find_single_item_name(call.argument_ids)

    def use_file_names(self, samples: Mapping[str, str], bad: Sequence[SamplePart]) -> dict[str, str]:
        """Replace row numbers in a diagnosis by file names, for datasets that return ready batches.

        The files are read again: as many of them must hold a bad value as there are samples.
        """
        if not any(map(is_item_row, samples)):
            return dict(samples)
        # Reading the files again has to find as many bad ones as there are bad samples.
        files = {name for part in bad for name in self.batches.list_bad_files(part.values)}
        if len(files) != len(samples):
            return dict(samples)
        return dict(zip(sorted(files), samples.values(), strict=True))

    def add_proven_names(self, call: CapturedCall) -> CapturedCall:
        """Copy a recorded call with sample names, if all floating-point tensors of each row agree on its name.

        For ranks that exchange calls: a copy of a call's tensors can no longer be matched with batches.
        """
        if call.sample_names:
            return call
        names_by_argument = [
            [self.batches.find_item_name(part.values) for part in parts]
            for parts in iter_sample_parts(call.arguments)
            if parts and parts[0].row is not None
        ]
        names: list[str] = []
        for row_names in zip(*names_by_argument, strict=True):
            name = row_names[0]
            if name is None or any(candidate != name for candidate in row_names):
                return call
            names.append(name)
        return replace(call, sample_names=tuple(names))

    def find_bad_items(self, call: CapturedCall, num_bad_rows: int) -> dict[str, str]:
        """Items with bad values in the data loader's batch that a call used, with their descriptions.

        A batch may be bad although no row of the call is: values may be transformed before a model sees them, or go
        only to the loss. An item is named if its loaded values are bad and the number of bad rows is the number of bad
        items or the size of the batch.
        """
        parts = (part for parts in iter_sample_parts(call.arguments) for part in parts)
        numbers = {self.batches.find_batch_number(part.values) for part in parts} - {None}
        # The order of batches is used only if no argument lies in the memory of one.
        number = call.batch_number
        if numbers:
            # Arguments of several batches, as in mixing, leave the batch uncertain.
            number = numbers.pop() if len(numbers) == 1 else None
        items = self.batches.find_bad_items(number)
        named = {name: description for name, description in items if name}
        covers_batch = num_bad_rows in (len(named), 0, count_samples(call.arguments))
        return named if named and len(named) == len({name for name, _ in items}) and covers_batch else {}

    def find_row_by_replacement(self, call: CapturedCall, model: nn.Module) -> str | None:
        """Name of the only sample whose replacement by another one of the batch makes the call healthy, or None.

        For models that need several samples at once, such as those with batch norm.
        """
        cutter = call.get_sample_extractor()
        if cutter is None or not 2 <= call.num_samples <= _MAX_REPLACED:
            return None
        # Rows whose replacement makes the whole call healthy.
        fixing_rows = [row for row in range(call.num_samples) if _is_healthy_with_other_row(call, row, cutter, model)]
        # Repeat the test: a random failure must not name a sample.
        if len(fixing_rows) != 1 or not _is_healthy_with_other_row(call, fixing_rows[0], cutter, model):
            return None
        # The unchanged call has to fail still, or the replacements have shown nothing.
        if _is_replay_finite(call, model):
            return None
        if call.sample_names:
            return call.sample_names[fixing_rows[0]]
        return self._find_row_name(call, fixing_rows[0], None, model, cutter)

    def name_failing_rows(
        self,
        call: CapturedCall,
        control: CapturedCall | None,
        failing: Sequence[str],
        model: nn.Module,
        micro_batch: MicroBatch,
    ) -> tuple[str, ...]:
        """Names of the samples that fail when run individually.

        A row is named by the argument that carries the failure, found by exchanging arguments with a healthy row.

        Args:
            failing: Names of the failing rows in the micro-batch, in any order.
            micro_batch: The failed call as the experiments ran it.
        """
        if call.sample_names:
            return tuple(failing)
        cutter = call.get_sample_extractor()
        rows = [micro_batch.ids.index(name) for name in failing if name in micro_batch.ids]
        # A batch of one item leaves no doubt about the sample.
        single = self.batches.find_single_item_name(call.argument_ids)
        if single is not None:
            return (single,)
        if cutter is None or not rows:
            return ()
        healthy_row = next((row for row in range(call.num_samples) if row not in rows), None)
        healthy: CapturedCall | None = None
        if healthy_row is not None:
            healthy = call.select_sample_row(healthy_row, cutter)
        elif control is not None and (control_cutter := control.get_sample_extractor()) is not None:
            healthy = control.select_sample_row(0, control_cutter)
        return tuple(self._find_row_name(call, row, healthy, model, cutter) for row in rows)

    def _find_row_name(
        self, call: CapturedCall, row: int, healthy: CapturedCall | None, model: nn.Module, cutter: SampleExtractor
    ) -> str:
        row_tensors = call.collect_row_tensors()
        if healthy is not None and len(row_tensors) > 1:
            single = call.select_sample_row(row, cutter)
            # Arguments whose exchange with a healthy sample moves the failure.
            failing_paths = [
                path for path in row_tensors if _is_argument_cause_of_failure(single, healthy, path, model)
            ]
            # The failure comes with the output's gradient, so no argument identifies the sample.
            if len(failing_paths) != 1 and _is_gradient_cause_of_failure(single, healthy, model):
                return call.ids[row]
            if len(failing_paths) == 1:
                row_tensors = {failing_paths[0]: row_tensors[failing_paths[0]]}
        # All arguments that may carry the failure have to give the same name.
        names = {self.batches.find_item_name(tensor[row]) for tensor in row_tensors.values()}
        name = names.pop() if len(names) == 1 else None
        return name if name is not None else call.ids[row]


def _is_healthy_with_other_row(call: CapturedCall, row: int, cutter: SampleExtractor, model: nn.Module) -> bool:
    # Any other row of the same call will do.
    source = next(candidate for candidate in range(call.num_samples) if candidate != row)
    arguments = cutter.replace_row(call.arguments, row, source)
    if arguments is None:
        return False
    return _is_replay_finite(replace(call, args=arguments[0], kwargs=arguments[1]), model)


def _is_argument_cause_of_failure(failed: CapturedCall, healthy: CapturedCall, path: str, model: nn.Module) -> bool:
    """True if an argument carries the failure of a row.

    Exchanging the argument between a failing and a healthy row then exchanges which of them fails.
    """
    failed_tensor = collect_named_tensors(failed.arguments).get(path)
    healthy_tensor = collect_named_tensors(healthy.arguments).get(path)
    if (
        failed_tensor is None
        or healthy_tensor is None
        or failed_tensor.shape != healthy_tensor.shape
        or failed_tensor.dtype != healthy_tensor.dtype
    ):
        return False
    return _is_replay_finite(_replace_tensor(failed, failed_tensor, healthy_tensor), model) and not _is_replay_finite(
        _replace_tensor(healthy, healthy_tensor, failed_tensor), model
    )


def _is_gradient_cause_of_failure(failed: CapturedCall, healthy: CapturedCall, model: nn.Module) -> bool:
    failed_gradients, healthy_gradients = failed.output_gradients, healthy.output_gradients
    if len(failed_gradients) != len(healthy_gradients) or not failed.has_gradient or not healthy.has_gradient:
        return False
    return _is_replay_finite(replace(failed, output_gradients=healthy_gradients), model)


def _replace_tensor(call: CapturedCall, tensor: torch.Tensor, replacement: torch.Tensor) -> CapturedCall:
    args, kwargs = map_tensors(lambda leaf: replacement if leaf is tensor else leaf, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _is_replay_finite(call: CapturedCall, model: nn.Module) -> bool:
    # The step does not matter: the call carries its own random state.
    micro_batch = RecordedCallMicroBatch.from_call(call, model, step=0, micro_step=0, rank=0)
    return replay_micro_batch(micro_batch, model).is_healthy(needs_gradient=False)
