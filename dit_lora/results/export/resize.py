"""Writes a LoRA in a lower rank: the best one of that rank, by singular values of each layer's update."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dit_lora.adapters.diffusers_format import base_weights
from dit_lora.config.experts import EXPERTS
from dit_lora.errors import DitLoraError
from dit_lora.families import get_family
from dit_lora.families.without_weights import configs_alone
from dit_lora.results.experts import targets_of
from dit_lora.results.export.export import Say, adapter_at, aside, hollow_of, write_pair
from dit_lora.results.export.formats import Exported, LoraForm, write_form
from dit_lora.results.export.hollow import load_lora_file
from dit_lora.results.export.low_rank import Cut, of_factors
from dit_lora.results.export.reduced import Reduced, attach_layers, ranks_of
from dit_lora.results.export.updates import updates_of
from dit_lora.results.source import is_chat
from dit_lora.results.verify.checks import PATTERNS
from dit_lora.training.session.session import quiet_libraries


@dataclass(frozen=True)
class ResizeRequest:
    """A request to lower a LoRA's rank."""

    target: Path
    """A run's folder, an adapter's or its file, in any form that `lora.init` reads."""
    out: Path
    """A folder that is not there yet."""
    cut: Cut
    to: LoraForm = "diffusers"
    model: str | None = None
    """The base, of which configs are enough; by default the run's, or the Hub id that the adapter names."""


def resize(request: ResizeRequest, say: Say = lambda _: None) -> list[Reduced]:
    """Write the adapter in lower ranks, read back and compared; returns what they keep, by transformer.

    Layers whose rank is that low already stay as they are. Raises `DitLoraError` where all are.
    """
    quiet_libraries()
    if request.out.exists():
        raise DitLoraError(f"{request.out} exists already; give another folder, or remove it")
    if is_chat(request.target, request.model):
        raise DitLoraError(f"{request.target} is of a chat model; resize takes diffusion models'")
    targets = targets_of(request.target)
    if len(targets) == 1:
        return [_resize(replace(request, target=targets[0]), say)]
    by_name = dict(zip(EXPERTS.values(), targets, strict=True))
    found: list[Reduced] = []
    write_pair(
        request.out,
        lambda name, own: found.append(
            _resize(replace(request, target=by_name[name], out=own), say)
        ),
    )
    return found


def _resize(request: ResizeRequest, say: Say) -> Reduced:
    source = adapter_at(request.target)
    base = source.base(request.model)
    family = get_family(base.family)
    with configs_alone(base) as configs, aside(request.out) as staged:
        checkpoint = family.open(configs, index=source.made.get("index") or {})
        hollow = partial(hollow_of, checkpoint)
        model, smaller = hollow(), hollow()
        load_lora_file(model, source.file, checkpoint.pipeline_class, family.comfyui)
        reduced = _reduced(model, request, checkpoint.part)
        layers = {one.name: one.stored for one in reduced.layers}
        attach_layers(smaller, layers, family, f"{source.file} resized", base_weights(model))
        # What was noted of the output is not this one's.
        kept = {k: v for k, v in source.made.items() if k not in ("output", "lora", *PATTERNS)}
        before = {key: source.made[key] for key in ("rank", "alpha") if key in source.made}
        made = {
            **kept,
            **ranks_of(smaller),
            "resized": {**before, "energy": reduced.energy},
            "exported": {"to": request.to},
        }
        adapter = Exported(smaller, made, family, checkpoint.pipeline_class, hollow)
        expert = EXPERTS.get(made.get("part", ""))
        whole = request.out.name
        name = f"{whole}_{expert}" if expert and not whole.endswith(f"_{expert}") else whole
        write_form(request.to, adapter, staged, name)
    say(f"{len(reduced.layers)} layers, read back and compared: the same update")
    return reduced


def _reduced(model: Any, request: ResizeRequest, part: str) -> Reduced:
    updates = updates_of(model)
    ranks = {name: term.rank for name, (term,) in updates.items()}
    cut = request.cut
    if cut.rank is not None and cut.rank >= max(ranks.values()):
        raise DitLoraError(
            f"--rank {cut.rank} lowers nothing: the ranks of {request.target} are at most {max(ranks.values())}"
        )
    own = {n: Cut(min(cut.rank, ranks[n])) if cut.rank is not None else cut for n in ranks}
    return Reduced([of_factors(n, term, own[n]) for n, (term,) in updates.items()], {}, part)
