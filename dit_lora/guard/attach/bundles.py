"""Bundles of loops that are not ours: the call of a model that tripped a step, to be made again in the same script."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dit_lora.config.ladder import LadderConfig
from dit_lora.errors import DitLoraError
from dit_lora.guard.attach.accelerator_adapter import Host
from dit_lora.guard.attach.calls.call_tree import CallReader, CallWriter
from dit_lora.guard.attach.calls.captured_call import CapturedCall
from dit_lora.guard.bundle import WEIGHTS, Bundle, too_large, write_bundle
from dit_lora.numerics.dtensors import gathered, stock_class

_LOG = logging.getLogger("dit_lora")
_PACKAGES = ("torch", "accelerate", "diffusers", "peft", "transformers", "safetensors", "triton")


@dataclass
class Bundles:
    """Writes the bundles of one process, as far as the settings go."""

    host: Host
    config: LadderConfig
    folder: Path | None
    """The guard's folder; without one nothing is written."""
    _written: int = 0
    _said: set[str] = field(default_factory=set)

    def write(
        self,
        call: CapturedCall,
        event: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        all_of: bool,
    ) -> str | None:
        """Write what it takes to make the call again; return the bundle's path below the folder, or None.

        With `all_of` every rank calls it for the same call, as sharded weights need, and the main process writes. A
        run is worth more than a bundle: what goes wrong is said, and raises nothing.
        """
        if (
            self.folder is None
            or self._written >= self.config.bundles
            or not self._can_be_written()
        ):
            return None
        self._written += 1
        assert call.owner is not None  # a call that was recorded has one
        trained = {name: p for name, p in call.owner.named_parameters() if p.requires_grad}
        size, lacks = sum(p.numel() * p.element_size() for p in trained.values()), []
        if size > self.config.bundle_mib * 2**20:
            # Not gathered either: what is sharded may not fit into the memory of one rank.
            trained, lacks = {}, [too_large(WEIGHTS, size)]
        weights = gathered(trained, keep=self.host.rank == 0) if all_of else trained
        if all_of and self.host.rank != 0:
            return None
        writer = CallWriter(call.generator)
        packed = packed_call(call, writer)
        replay = {name: event[name] for name in ("step", "micro_step", "rank")}
        about = {
            **facts,
            "event": dict(event),
            "call": packed,
            "model": about_model(call.owner),
            "replay": {**replay, "ids": list(call.ids)},
            "packages": versions(),
        }
        folder = self._place(event)
        try:
            left_out = write_bundle(
                folder,
                about,
                writer.tensors,
                weights,
                limit_mib=self.config.bundle_mib,
                lacks=[*writer.left_out, *lacks],
            )
        except OSError as error:
            _LOG.warning("guard: cannot write %s: %s", folder, error.strerror)
            return None
        if left_out:
            self._say_once(f"{folder} cannot be replayed: it lacks {'; '.join(left_out)}")
        return f"bundles/{folder.name}"

    def _can_be_written(self) -> bool:
        if self.host.under_deepspeed:  # its engine holds the weights
            return False
        if util.find_spec("safetensors") is None:
            self._say_once("no bundles are written, for which safetensors has to be installed")
            return False
        return True

    def _place(self, event: Mapping[str, Any]) -> Path:
        assert self.folder is not None
        place = f"rank_{event['rank']}_micro_step_{event['micro_step']}"
        name = f"step_{event['step']:06d}_{place}"
        bundles = self.folder / "bundles"
        earlier = len(list(bundles.glob(f"{name}*")))  # an earlier start wrote to the same folder
        return bundles / (f"{name}_again_{earlier}" if earlier else name)

    def _say_once(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            _LOG.warning("guard: %s", words)


def packed_call(call: CapturedCall, writer: CallWriter) -> dict[str, Any]:
    """Return a call as plain values; its tensors are then the writer's."""
    packed: dict[str, Any] = {
        "args": [writer.node(one, f"argument {number}") for number, one in enumerate(call.args)],
        "kwargs": [[name, writer.node(one, name)] for name, one in call.kwargs.items()],
        "output_is_finite": call.output_is_finite,
    }
    packed["output_gradients"] = [
        writer.node(gradient, "gradient of the output") for gradient in call.output_gradients
    ]
    kept = {
        "random_state": call.random_state,
        "cuda_random_state": call.cuda_random_state,
        "generator_state": call.generator[1] if call.generator is not None else None,
    }
    packed |= {name: writer.node(tensor, name) for name, tensor in kept.items()}
    if call.generator is not None:
        packed["generator_device"] = call.generator[0].device.type
    return packed


def unpacked_call(bundle: Bundle, model: nn.Module, device: torch.device) -> CapturedCall:
    """Return the call of a bundle, to be made of this model. Raises `DitLoraError` where the bundle is torn."""
    facts = bundle.facts["call"]
    states = CallReader(bundle.samples, torch.device("cpu"), None)
    try:
        generator, state = None, states.value(facts["generator_state"])
        if state is not None:
            # A state of another device's generator is of no use to this device's.
            kind = facts["generator_device"]
            generator = torch.Generator(device if kind == device.type else "cpu")
            state = state if generator.device.type == kind else generator.get_state()
        here = CallReader(bundle.samples, device, generator)
        cuda = states.value(facts["cuda_random_state"])
        # Bundles of earlier versions have the gradient of one output.
        gradients = facts.get("output_gradients") or [facts["output_gradient"]]
        # The outputs themselves are made anew; what counts is whether they were finite.
        output = torch.tensor(0.0 if facts["output_is_finite"] else torch.nan)
        return CapturedCall(
            args=tuple(here.value(node) for node in facts["args"]),
            kwargs={name: here.value(node) for name, node in facts["kwargs"]},
            names=tuple(bundle.facts["replay"]["ids"]),
            random_state=states.value(facts["random_state"]),
            cuda_random_state=cuda if device.type == "cuda" else None,
            generator=(generator, state) if generator is not None else None,
            outputs=(output,) * len(gradients),
            output_gradients=[here.value(node) for node in gradients],
            owner=model,
            micro_step=bundle.facts["replay"]["micro_step"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DitLoraError(f"the bundle is torn: its call cannot be read ({error})") from error


def about_model(model: nn.Module) -> dict[str, Any]:
    """Return what tells a model from others: its class, and its parameters' names and shapes."""
    return {"class": stock_class(model).__name__, "parameters": parameters_in_words(model)}


def parameters_in_words(model: nn.Module) -> list[str]:
    # Lines, and no mapping: a key that is called after a token would be taken for a secret.
    return [f"{n} {'x'.join(map(str, p.shape)) or 'scalar'}" for n, p in model.named_parameters()]


def versions() -> dict[str, str]:
    """Return the versions of what is installed of the packages that matter."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
