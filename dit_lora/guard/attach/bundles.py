"""Replay bundles for any training loop: the recorded call of a failed step, to be repeated by the same script."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.calls.call_tree import CallReader, CallWriter
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.attach.guard_json import list_package_versions
from dit_lora.guard.repro_bundle import WEIGHTS, Bundle, format_oversize_message, write_bundle
from dit_lora.numerics.dtensors import gather_tensors, get_original_class

_LOG = logging.getLogger("dit_lora")


@dataclass
class BundleWriter:
    """Writes at most `config.bundles` replay bundles. Bundles of other processes and earlier starts do not count."""

    host: Host
    config: RecoveryConfig
    folder: Path | None
    """The guard's folder; None writes nothing."""
    _num_written: int = 0
    _logged_messages: set[str] = field(default_factory=set)

    def write(
        self, call: CapturedCall, event: Mapping[str, Any], facts: Mapping[str, Any], *, is_shared: bool
    ) -> str | None:
        """Write a replay bundle of a failed model call: inputs, weights and random state.

        Returns its relative path, or None.

        With `is_shared`, every rank passes the same call, as sharded weights need, and the main process writes. A
        bundle must not end a run: failures are logged and raise nothing.
        """
        # DeepSpeed's engine holds the weights.
        if self.folder is None or self._num_written >= self.config.bundles or self.host.uses_deepspeed:
            return None
        if util.find_spec("safetensors") is None:
            self._warn_once("no bundles are written, because safetensors is not installed")
            return None
        # Count the attempt, so that a full disk is not tried again at every failure.
        self._num_written += 1
        assert call.owner is not None  # set for every recorded call
        trained = {name: p for name, p in call.owner.named_parameters() if p.requires_grad}
        size, missing_parts = sum(p.numel() * p.element_size() for p in trained.values()), []
        if size > self.config.bundle_mib * 2**20:
            # Do not gather them either: sharded weights may not fit into the memory of one rank.
            trained, missing_parts = {}, [format_oversize_message(WEIGHTS, size)]
        # Collective: every rank takes part, and only the main process keeps the result.
        weights = gather_tensors(trained, keep_values=self.host.rank == 0) if is_shared else trained
        if is_shared and self.host.rank != 0:
            return None
        writer = CallWriter(call.generator)
        # This also collects the call's tensors and whatever cannot be stored in the writer.
        packed = pack_call(call, writer)
        metadata_facts = {
            **facts,
            "event": dict(event),
            "call": packed,
            "model": describe_model(call.owner),
            "replay": {name: event[name] for name in ("step", "micro_step", "rank")} | {"ids": list(call.ids)},
            "packages": list_package_versions(),
        }
        name = f"step_{event['step']:06d}_rank_{event['rank']}_micro_step_{event['micro_step']}"
        # An earlier start of the script may have written to the same folder.
        num_earlier = len(list((self.folder / "bundles").glob(f"{name}*")))
        folder = self.folder / "bundles" / (f"{name}_again_{num_earlier}" if num_earlier else name)
        try:
            missing = write_bundle(
                folder,
                metadata_facts,
                writer.tensors,
                weights,
                limit_mib=self.config.bundle_mib,
                missing_parts=[*writer.omitted_values, *missing_parts],
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


def pack_call(call: CapturedCall, writer: CallWriter) -> dict[str, Any]:
    """Convert a recorded model call to JSON values for a replay bundle. Its tensors are collected in `writer`."""
    packed: dict[str, Any] = {
        "args": [writer.to_node(value, f"argument {number}") for number, value in enumerate(call.args)],
        "kwargs": [[name, writer.to_node(value, name)] for name, value in call.kwargs.items()],
        "output_is_finite": call.has_finite_output,
        "output_gradients": [writer.to_node(gradient, "gradient of the output") for gradient in call.output_gradients],
    }
    states = {
        "random_state": call.random_state,
        "cuda_random_state": call.cuda_random_state,
        "generator_state": call.generator[1] if call.generator is not None else None,
    }
    packed |= {name: writer.to_node(tensor, name) for name, tensor in states.items()}
    if call.generator is not None:
        packed["generator_device"] = call.generator[0].device.type
    return packed


def unpack_call(bundle: Bundle, model: nn.Module, device: torch.device) -> CapturedCall:
    """Rebuild a recorded model call from a replay bundle so that it runs on `model`.

    Raises:
        DitLoraError: If the bundle is incomplete or cannot be read.
    """
    facts = bundle.facts["call"]
    # Generator states have to stay on the CPU; inputs go to the model's device below.
    states = CallReader(bundle.samples, torch.device("cpu"), None)
    try:
        generator, state = None, states.read_node(facts["generator_state"])
        if state is not None:
            # A generator state from another device type cannot be loaded here.
            kind = facts["generator_device"]
            generator = torch.Generator(device if kind == device.type else "cpu")
            state = state if generator.device.type == kind else generator.get_state()
        inputs = CallReader(bundle.samples, device, generator)
        cuda = states.read_node(facts["cuda_random_state"])
        # Older bundles store the gradient of a single output.
        gradients = facts.get("output_gradients") or [facts["output_gradient"]]
        # The replay recomputes the outputs; only whether they were finite is needed here.
        output = torch.tensor(0.0 if facts["output_is_finite"] else torch.nan)
        return CapturedCall(
            args=tuple(inputs.read_node(node) for node in facts["args"]),
            kwargs={name: inputs.read_node(node) for name, node in facts["kwargs"]},
            sample_names=tuple(bundle.facts["replay"]["ids"]),
            random_state=states.read_node(facts["random_state"]),
            cuda_random_state=cuda if device.type == "cuda" else None,
            generator=(generator, state) if generator is not None else None,
            outputs=(output,) * len(gradients),
            output_gradients=[inputs.read_node(node) for node in gradients],
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
