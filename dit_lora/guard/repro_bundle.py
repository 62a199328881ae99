"""Store one event in a folder that another machine can replay: the micro-batch, the trained weights and metadata.

The bundle of a wrong gradient has all micro-batches of the step, and the gradient itself.

Apart from sample names, it holds nothing that identifies a machine or a person: no absolute path, token or
environment. The samples themselves are included, encoded or as the model received them, because nothing can be
replayed without them. safetensors is imported lazily, since the guard works without it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dit_lora.errors import DitLoraError
from dit_lora.files import read_file_inside_folder, write_atomically
from dit_lora.redact import redact_value

FACTS, _SAMPLES, WEIGHTS = "bundle.json", "samples.safetensors", "trained.safetensors"
_GRADIENTS = "gradients.safetensors"
FORMAT = 1
# 16 GiB: a bundle may come from somebody else, so do not read files of any size.
_MAX_TENSORS_BYTES = 2**34


@dataclass(frozen=True)
class Bundle:
    """A replay bundle read from its folder: the files that reproduce one failed micro-batch."""

    facts: Mapping[str, Any]
    """`event`, `replay` (step, micro-step, rank, ids), `packages` and `left_out`. A run adds `recipe`, and draws to
    `replay`; another loop adds `call` and `model`. A wrong gradient adds `micro_batches`: `replay` of each."""
    samples: Mapping[str, torch.Tensor]
    """Tensors of the micro-batch by name. With `micro_batches` in the facts, their names begin with `NUMBER/`."""
    weights: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The step's gradient by parameter, in the bundle of a wrong one; else empty."""

    @property
    def micro_batches(self) -> list[tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]]:
        """The `replay` and the tensors of each micro-batch."""
        replays = self.facts.get("micro_batches")
        if replays is None:
            return [(self.facts["replay"], self.samples)]
        pairs: list[tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]] = []
        for number, replay in enumerate(replays):
            prefix = f"{number}/"
            tensors = {name.removeprefix(prefix): t for name, t in self.samples.items() if name.startswith(prefix)}
            pairs.append((replay, tensors))
        return pairs


def write_replay_bundle(
    folder: Path,
    facts: Mapping[str, Any],
    samples: Mapping[str, torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    *,
    gradients: Mapping[str, torch.Tensor] | None = None,
    limit_mib: float,
    missing_parts: Sequence[str] = (),
) -> list[str]:
    """Write a replay bundle of at most `limit_mib` MiB; returns messages about parts left out, recorded there too.

    Samples come first; weights that no longer fit are left out completely. `missing_parts` lists the parts that the
    caller has already left out.
    """
    from safetensors.torch import save

    # `limit` is the remaining size in bytes.
    limit, missing = limit_mib * 2**20, [*missing_parts]
    contents: dict[str, Mapping[str, torch.Tensor]] = {}
    parts = [(_SAMPLES, samples), (WEIGHTS, weights)]
    if gradients is not None:
        parts.append((_GRADIENTS, gradients))
    for name, tensors in parts:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > limit:
            missing.append(format_oversize_message(name, size))
        else:
            contents[name], limit = tensors, limit - size
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in contents.items():
        # Copy: safetensors does not accept tensors that share memory.
        cpu_tensors = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
        write_atomically(folder / name, save(cpu_tensors))
    # The metadata comes last: a folder without it is an incomplete bundle.
    redacted_metadata = redact_value({**facts, "format": FORMAT, "left_out": missing})
    write_atomically(folder / FACTS, json.dumps(redacted_metadata, indent=2, sort_keys=True) + "\n")
    return missing


def format_oversize_message(name: str, size: int) -> str:
    """Message about a part of `size` bytes that was left out of a bundle, as it exceeds `guard.bundle_mib`."""
    return f"{name}: {size / 2**20:.0f} MiB, more than guard.bundle_mib"


def read_replay_bundle(folder: Path) -> Bundle:
    """Read a replay bundle from its folder.

    Raises:
        DitLoraError: If the folder does not hold a bundle, or the bundle is incomplete or lacks a part that a replay
            needs.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from dit_lora.config.records import BundleFacts, parse_typed_json, validate_value

    try:
        stored = parse_typed_json(read_file_inside_folder(folder, folder / FACTS), dict[str, Any], FACTS)
        # Check the version before the keys, which may differ between versions.
        version = stored["format"]
        if version != FORMAT:
            raise DitLoraError(f"{folder} has format {version}; this version reads {FORMAT}")
        facts = validate_value(stored, BundleFacts, FACTS)
        missing = facts["left_out"]
        if missing:
            raise DitLoraError(f"{folder} cannot be replayed: it lacks {'; '.join(missing)}")
        samples = load(read_file_inside_folder(folder, folder / _SAMPLES, _MAX_TENSORS_BYTES))
        weights = load(read_file_inside_folder(folder, folder / WEIGHTS, _MAX_TENSORS_BYTES))
        gradients = {}
        if "micro_batches" in facts:
            gradients = load(read_file_inside_folder(folder, folder / _GRADIENTS, _MAX_TENSORS_BYTES))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DitLoraError(
            f"{folder} is not a complete bundle: it has no {error.filename}; give a folder below a run's bundles/"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DitLoraError(f"{folder} is not a complete bundle: {error}") from error
    bundle = Bundle(facts, samples, weights, gradients)
    if not all(tensors for _, tensors in bundle.micro_batches):
        raise DitLoraError(f"{folder} is not a complete bundle: {_SAMPLES} lacks a micro-batch of {FACTS}")
    return bundle
