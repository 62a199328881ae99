"""Replay bundles for any training loop: the recorded call of a failed step, to be repeated by the same script."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.accelerator_adapter import LoopProcessContext
from dit_lora.guard.attach.calls.call_tree import CallDeserializer, CallSerializer
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.guard_json import list_package_versions
from dit_lora.guard.repro_bundle import WEIGHTS, Bundle, format_oversize_message, write_replay_bundle
from dit_lora.numerics.dtensors import gather_tensors, get_original_class

_LOG = logging.getLogger("dit_lora")


@dataclass
class BundleWriter:
    """Writes at most `config.bundles` replay bundles. Bundles of other processes and earlier starts do not count."""

    host: LoopProcessContext
    config: RecoveryConfig
    folder: Path | None
    """The guard's folder; None writes nothing."""
    _num_written: int = 0
    _logged_messages: set[str] = field(default_factory=set)

    def write_call_bundle(
        self, call: CapturedCall, event: Mapping[str, Any], facts: Mapping[str, Any], *, is_shared: bool
    ) -> str | None:
        """Write a replay bundle of a failed model call: inputs, weights and random state.

        Returns its relative path, or None.

        With `is_shared`, every rank passes the same call, as sharded weights need, and the main process writes. A
        bundle must not end a run: failures are logged and raise nothing.
        """
        if not self._reserve_bundle_slot():
            return None
        assert call.owner is not None  # set for every recorded call
        trained, missing_parts = self._select_weights(call.owner)
        # Collective: every rank takes part, and only the main process keeps the result.
        weights = gather_tensors(trained, keep_values=self.host.rank == 0) if is_shared else trained
        if is_shared and self.host.rank != 0:
            return None
        writer = CallSerializer(call.generator)
        # This also collects the call's tensors and whatever cannot be stored in the writer.
        packed = serialize_model_call(call, writer)
        metadata_facts = {
            **facts,
            "event": dict(event),
            "call": packed,
            "model": describe_model(call.owner),
            "replay": {name: event[name] for name in ("step", "micro_step", "rank")} | {"ids": list(call.ids)},
            "packages": list_package_versions(),
        }
        name = f"step_{event['step']:06d}_rank_{event['rank']}_micro_step_{event['micro_step']}"
        missing_parts += writer.omitted_values
        return self._write_bundle_files(name, metadata_facts, writer.tensors, weights, missing_parts=missing_parts)

    def write_gradient_step_bundle(
        self,
        calls: Sequence[CapturedCall],
        gradients: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        event: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> str | None:
        """Write a replay bundle of a step with a wrong gradient: its calls of one model, and `gradients`.

        Returns its relative path, or None. `dtype` is the lowest precision of the model's forward pass. Failures are
        logged and raise nothing.
        """
        if not self._reserve_bundle_slot():
            return None
        model = calls[0].owner
        assert model is not None  # set for every recorded call
        weights, missing_parts = self._select_weights(model)
        packed_calls, replays = [], []
        samples: dict[str, torch.Tensor] = {}
        for number, call in enumerate(calls):
            writer = CallSerializer(call.generator)
            packed = serialize_model_call(call, writer)
            packed["outputs"] = [writer.to_json_node(output.detach(), "output") for output in call.outputs]
            packed_calls.append(packed)
            position = {"step": event["step"], "micro_step": call.micro_step, "rank": event["rank"]}
            replays.append({**position, "ids": list(call.ids)})
            # Names begin with the number of the call, in the order of `micro_batches`.
            samples |= {f"{number}/{name}": tensor for name, tensor in writer.tensors.items()}
            missing_parts += writer.omitted_values
        metadata_facts = {
            **facts,
            "event": dict(event),
            "calls": packed_calls,
            "dtype": str(dtype),
            "micro_batches": replays,
            "model": describe_model(model),
            "replay": replays[0],
            "packages": list_package_versions(),
        }
        name = f"step_{event['step']:06d}_gradient"
        return self._write_bundle_files(name, metadata_facts, samples, weights, gradients, missing_parts=missing_parts)

    def _reserve_bundle_slot(self) -> bool:
        """True if another bundle may be written, which is counted."""
        # DeepSpeed's engine holds the weights.
        if self.folder is None or self._num_written >= self.config.bundles or self.host.uses_deepspeed:
            return False
        if util.find_spec("safetensors") is None:
            self._warn_once("no bundles are written, because safetensors is not installed")
            return False
        # Count the attempt, so that a full disk is not tried again at every failure.
        self._num_written += 1
        return True

    def _select_weights(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], list[str]]:
        """The trained weights that go into a bundle, and messages about those left out for their size."""
        trained: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        size = sum(p.numel() * p.element_size() for p in trained.values())
        if size <= self.config.bundle_mib * 2**20:
            return trained, []
        # Do not gather them either: sharded weights may not fit into the memory of one rank.
        return {}, [format_oversize_message(WEIGHTS, size)]

    def _write_bundle_files(
        self,
        name: str,
        facts: Mapping[str, Any],
        samples: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor] | None = None,
        *,
        missing_parts: Sequence[str],
    ) -> str | None:
        assert self.folder is not None  # see `_reserve_bundle_slot`
        # An earlier start of the script may have written to the same folder.
        num_earlier = len(list((self.folder / "bundles").glob(f"{name}*")))
        folder = self.folder / "bundles" / (f"{name}_again_{num_earlier}" if num_earlier else name)
        try:
            missing = write_replay_bundle(
                folder,
                facts,
                samples,
                weights,
                gradients=gradients,
                limit_mib=self.config.bundle_mib,
                missing_parts=missing_parts,
            )
        except OSError as error:
            _LOG.warning("guard: cannot write %s: %s", folder, error.strerror)
            return None
        if missing:
            self._warn_once(f"{folder} cannot be replayed: it lacks {'; '.join(missing)}")
        return f"bundles/{folder.name}"

    def _warn_once(self, message: str) -> None:
        if message not in self._logged_messages:
            self._logged_messages.add(message)
            _LOG.warning("guard: %s", message)


def serialize_model_call(call: CapturedCall, writer: CallSerializer) -> dict[str, Any]:
    """Convert a recorded model call to JSON values for a replay bundle. Its tensors are collected in `writer`."""
    packed: dict[str, Any] = {
        "args": [writer.to_json_node(value, f"argument {number}") for number, value in enumerate(call.args)],
        "kwargs": [[name, writer.to_json_node(value, name)] for name, value in call.kwargs.items()],
        "output_is_finite": call.has_finite_output,
        "output_gradients": [
            writer.to_json_node(gradient, "gradient of the output") for gradient in call.output_gradients
        ],
    }
    states = {
        "random_state": call.random_state,
        "cuda_random_state": call.cuda_random_state,
        "generator_state": call.generator[1] if call.generator is not None else None,
    }
    packed |= {name: writer.to_json_node(tensor, name) for name, tensor in states.items()}
    if call.generator is not None:
        packed["generator_device"] = call.generator[0].device.type
    return packed


def deserialize_step_calls(bundle: Bundle, model: nn.Module, device: torch.device) -> list[CapturedCall]:
    """Rebuild all calls, with their outputs, from the bundle of a wrong gradient so that they run on `model`.

    Raises:
        DitLoraError: If the bundle is incomplete or cannot be read.
    """
    pairs = bundle.micro_batches
    packed_calls = bundle.facts["calls"]
    if len(packed_calls) != len(pairs):
        raise DitLoraError("the bundle is torn: its calls are not as many as its micro-batches")
    calls = []
    for packed, (position, tensors) in zip(packed_calls, pairs, strict=True):
        facts = {**bundle.facts, "call": packed, "replay": position}
        call = deserialize_model_call(replace(bundle, facts=facts, samples=tensors), model, device)
        reader = CallDeserializer(tensors, device, None)
        try:
            outputs = tuple(reader.from_json_node(node) for node in packed["outputs"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DitLoraError(f"the bundle is torn: its outputs cannot be read ({error})") from error
        calls.append(replace(call, outputs=outputs))
    return calls


def deserialize_model_call(bundle: Bundle, model: nn.Module, device: torch.device) -> CapturedCall:
    """Rebuild a recorded model call from a replay bundle so that it runs on `model`.

    Raises:
        DitLoraError: If the bundle is incomplete or cannot be read.
    """
    facts = bundle.facts["call"]
    # Generator states have to stay on the CPU; inputs go to the model's device below.
    states = CallDeserializer(bundle.samples, torch.device("cpu"), None)
    try:
        generator, state = None, states.from_json_node(facts["generator_state"])
        if state is not None:
            # A generator state from another device type cannot be loaded here.
            kind = facts["generator_device"]
            generator = torch.Generator(device if kind == device.type else "cpu")
            state = state if generator.device.type == kind else generator.get_state()
        inputs = CallDeserializer(bundle.samples, device, generator)
        cuda = states.from_json_node(facts["cuda_random_state"])
        # Older bundles store the gradient of a single output.
        gradients = facts.get("output_gradients") or [facts["output_gradient"]]
        # The replay recomputes the outputs; only whether they were finite is needed here.
        output = torch.tensor(0.0 if facts["output_is_finite"] else torch.nan)
        return CapturedCall(
            args=tuple(inputs.from_json_node(node) for node in facts["args"]),
            kwargs={name: inputs.from_json_node(node) for name, node in facts["kwargs"]},
            sample_names=tuple(bundle.facts["replay"]["ids"]),
            random_state=states.from_json_node(facts["random_state"]),
            cuda_random_state=cuda if device.type == "cuda" else None,
            generator=(generator, state) if generator is not None else None,
            outputs=(output,) * len(gradients),
            output_gradients=[inputs.from_json_node(node) for node in gradients],
            owner=model,
            micro_step=bundle.facts["replay"]["micro_step"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DitLoraError(f"the bundle is torn: its call cannot be read ({error})") from error


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Class name and parameter shapes of a model, which identify it in a replay bundle."""
    return {"class": get_original_class(model).__name__, "parameters": describe_parameters(model)}


def describe_parameters(model: nn.Module) -> list[str]:
    # A list of lines, not a dict: redaction would take a key that contains "token" for a secret.
    return [f"{n} {'x'.join(map(str, p.shape)) or 'scalar'}" for n, p in model.named_parameters()]
