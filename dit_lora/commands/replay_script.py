"""Replays a bundle of another training loop.

Its script runs up to the first call of the model, which is replaced by the bundle's call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dit_lora.commands.replayed import ReplayResult, describe_version_differences, run_and_diagnose_micro_batch
from dit_lora.commands.replayed_gradient import replay_gradient
from dit_lora.errors import DitLoraError, format_list
from dit_lora.guard.attach.bundles import describe_parameters, deserialize_model_call, deserialize_step_calls
from dit_lora.guard.attach.calls.call_batch import RecordedCallMicroBatch
from dit_lora.guard.attach.calls.gradient_check import make_micro_batch
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, add_listener, remove_listener
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.guard_json import list_package_versions
from dit_lora.guard.attach.interception import MethodInterceptions
from dit_lora.guard.attach.run_script import run_as_main
from dit_lora.guard.gradient_check.slopes import TOLERANCES
from dit_lora.guard.repro_bundle import Bundle
from dit_lora.numerics.dtensors import copy_full_values, get_original_class, has_collective_forward
from dit_lora.terminal import echo


class _ReplayFinished(BaseException):
    """Raised to leave the user's training script after a replay.

    A `BaseException`, so that the script's own `except Exception` does not catch it.
    """


def replay_in_script(
    bundle: Bundle, folder: Path, script: str | None, arguments: Sequence[str], *, fp32: bool, without: Sequence[str]
) -> ReplayResult:
    """Run a training script until it calls the bundle's model, load the trained weights, and repeat the recorded call.

    Raises:
        DitLoraError: There is no script, or no model that it trains matches the bundle.
    """
    if script is None:
        raise DitLoraError(
            f"{folder} comes from another training loop; add --script SCRIPT.py [-- ARGS], which is run until "
            "it first calls its model"
        )
    waiting_replay = _ScriptReplay(bundle, fp32=fp32, without=without)
    # The script runs with the user's rights and arguments, as in the original loop.
    with waiting_replay.wait_for_call():
        run_as_main(script, arguments)
    # Raised here, outside of the script, which might have caught it.
    if waiting_replay.problem is not None:
        raise waiting_replay.problem
    if waiting_replay.result is None:
        raise waiting_replay.make_no_match_error(script)
    return waiting_replay.result


class _ScriptReplay:
    """Waits until a training script calls the bundle's model, and makes the recorded call instead."""

    def __init__(self, bundle: Bundle, *, fp32: bool, without: Sequence[str]) -> None:
        self.result: ReplayResult | None = None
        self.problem: DitLoraError | None = None
        """Why the call could not be made."""
        self._bundle = bundle
        self._fp32 = fp32
        self._without = without
        self._expected_parameters: list[str] = bundle.facts["model"]["parameters"]
        self._class_name: str = bundle.facts["model"]["class"]
        self._other_models: dict[int, tuple[str, list[str]]] = {}
        """Called models that do not match, by id: class, and differences."""
        self._stepped_optimizers: set[int] = set()

    @contextmanager
    def wait_for_call(self) -> Iterator[None]:
        """Context that checks every outermost module call.

        It ends the script after the replay, or when no call can follow.
        """
        interceptions = MethodInterceptions()
        # The script's own guard must not write into its folder: the bundle may be in there.
        interceptions.intercept_function(Guard, "__init__", self._create_guard_without_folder)
        # Called around each call of a module that is not inside another module's call.
        add_listener(self._intercept_call)
        # For every optimizer of the process.
        hook = register_optimizer_step_pre_hook(self._stop_at_second_step)
        try:
            yield
        except _ReplayFinished:
            pass
        # A script may end itself after its last step, with or without an error.
        except SystemExit as end:
            if end.code:  # the script has printed the reason
                raise
        finally:
            hook.remove()
            remove_listener(self._intercept_call)
            interceptions.restore_originals()

    def make_no_match_error(self, script: str) -> DitLoraError:
        """The error that lists all differences of the called model that is most similar to the bundle's."""
        if not self._other_models:
            return DitLoraError(
                f"{script} did not call a model in training; the bundle has a call of {self._class_name}"
            )
        # Prefer a model of the same class, then the one with the fewest differences.
        name, differing = min(
            self._other_models.values(), key=lambda candidate: (candidate[0] != self._class_name, len(candidate[1]))
        )
        called = ", ".join(dict.fromkeys(class_name for class_name, _ in self._other_models.values()))
        return DitLoraError(
            format_list(
                f"no model that {script} calls fits the bundle's {self._class_name} (called: {called}); give the "
                f"arguments that the script had then, behind --. What differs in {name}",
                differing,
            )
        )

    @contextmanager
    def _intercept_call(self, call: OutermostCall) -> Iterator[None]:
        """Called around each outermost module call of the script.

        If the model matches the bundle, the bundle is replayed and the script is left.
        """
        model = self._find_matching_module(call.module)
        if model is not None:
            try:
                self.result = self._replay(model)
            # Stored, because the script might catch it and continue training.
            except DitLoraError as problem:
                self.problem = problem
            raise _ReplayFinished
        yield

    def _find_matching_module(self, outermost: nn.Module) -> nn.Module | None:
        """The module that matches the bundle: the called one or, inside a wrapper, a part of it. None if none does."""
        # A wrapper such as DDP comes first, then the modules inside it.
        for module in outermost.modules():
            is_of_class = get_original_class(module).__name__ == self._class_name
            # Submodules of other classes cannot match; comparing their parameters would take long.
            if module is not outermost and not is_of_class:
                continue
            parameters = describe_parameters(module)
            # Names, shapes and their order must be equal.
            if parameters == self._expected_parameters and is_of_class:
                return module
            if parameters:
                kind = get_original_class(module).__name__
                differing = _find_differences(self._expected_parameters, parameters) or ["the class, or the order"]
                self._other_models.setdefault(id(module), (kind, differing))
        return None

    def _create_guard_without_folder(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, "folder": None})

    def _stop_at_second_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Leave the script at an optimizer's second step: by then every model of a training step was called."""
        if id(optimizer) in self._stepped_optimizers:
            raise _ReplayFinished
        self._stepped_optimizers.add(id(optimizer))

    def _replay(self, model: nn.Module) -> ReplayResult:
        """Load the bundle's weights into the model, repeat the recorded call, and diagnose it."""
        bundle, facts = self._bundle, self._bundle.facts["replay"]
        echo(f"replay: loaded the bundle's weights into {self._class_name}", err=True)
        parameters = dict(model.named_parameters())
        for name, weight in bundle.weights.items():
            # Works for sharded parameters too, from the full weights.
            copy_full_values(parameters[name], weight)
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        notes = describe_version_differences(bundle, list_package_versions())
        if "calls" in bundle.facts:
            return self._replay_gradient(model, device, notes)
        call = deserialize_model_call(bundle, model, device)
        # Ranks that share sharded weights run it together, and the first one reports.
        rank = 0 if has_collective_forward(model) else facts["rank"]
        position = {"step": facts["step"], "micro_step": facts["micro_step"], "rank": rank}
        return run_and_diagnose_micro_batch(
            bundle,
            RecordedCallMicroBatch.from_call(call, model, **position),
            model,
            fp32=self._fp32,
            without=self._without,
            limit=None,
            masked_attention=None,
            notes=notes,
        )

    def _replay_gradient(self, model: nn.Module, device: torch.device, notes: Sequence[str]) -> ReplayResult:
        """Repeat all calls of a step with a wrong gradient."""
        facts = self._bundle.facts
        dtypes = {str(dtype): dtype for dtype in TOLERANCES}
        if facts["dtype"] not in dtypes:
            raise DitLoraError(f"the bundle is torn: a gradient in {facts['dtype']} cannot be checked")
        calls = deserialize_step_calls(self._bundle, model, device)
        # The gradients of the outputs are in the bundle, so the loop's own loss is not needed.
        batches = [make_micro_batch(call, facts["replay"]["step"], len(calls)) for call in calls]
        with torch.enable_grad():
            return replay_gradient(
                self._bundle,
                batches,
                model,
                dtype=dtypes[facts["dtype"]],
                fp32=self._fp32,
                disabled_names=self._without,
                masked_attention=None,
                notes=notes,
                has_losses=False,
            )


def _find_differences(expected: Sequence[str], actual: Sequence[str]) -> list[str]:
    """Parameters that only one of two models has, or that have different shapes."""
    # "name shape" to a dict by name
    recorded_shapes, current_shapes = (
        dict(description.rsplit(" ", 1) for description in descriptions) for descriptions in (expected, actual)
    )
    shapes = {
        name: (recorded_shapes.get(name), current_shapes.get(name)) for name in [*recorded_shapes, *current_shapes]
    }
    return [
        f"{name}: {recorded_shape or 'not'} in the bundle, {current_shape or 'not'} here"
        for name, (recorded_shape, current_shape) in shapes.items()
        if recorded_shape != current_shape
    ]
