"""Names that other programs have for a model's layers; which they are is a fact of its family."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class LayerNames:
    """One program's names of a model's layers in a LoRA's file, or why it has none."""

    prefix: str = "diffusion_model."
    """Put before every name."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The program's names by Diffusers', in which `*` is a block's number; empty: they are the same."""
    without: tuple[str, ...] = ()
    """Patterns of layers that the program has no name for, and would pass over."""
    alpha: bool = True
    """True if a file may say alpha in `.alpha` tensors; where not, alpha over rank is multiplied into B."""
    lacking: str = ""
    """The reason why the program loads no LoRA of this model; empty if it does."""

    def of(self, name: str) -> str | None:
        """Return the program's name of one of Diffusers' layers; None if it has no counterpart of it."""
        if self.lacking or any(fnmatchcase(name, pattern) for pattern in self.without):
            return None
        theirs = _renamed(self.renamed, name) if self.renamed else name
        return theirs if theirs is None else f"{self.prefix}{theirs}"


def no_names(why: str) -> LayerNames:
    """Return the names of a program that loads no LoRA of a model, with the reason."""
    return LayerNames(lacking=why)


UNKNOWN = no_names("no names of ComfyUI are known here for this family")


def kohya_name(name: str) -> str:
    """Return a layer's name in kohya's layout, as VideoX-Fun writes and looks for it."""
    # The two underscores stand around an empty part of the name.
    return f"lora_unet__{name.replace('.', '_')}"


def spellings(name: str, comfyui: LayerNames) -> Iterator[str]:
    """Yield the names under which files have a layer: Diffusers', PEFT's, ComfyUI's, kohya's, LyCORIS'.

    A trainer that knows the published model writes ComfyUI's names, which are that model's, where another writes
    Diffusers'; kohya's layout has either with underscores.
    """
    theirs = comfyui.of(name)
    bare = name if theirs is None else theirs.removeprefix(comfyui.prefix)
    for one in dict.fromkeys((name, bare)):
        yield from file_spellings(one)
    if theirs is not None:
        yield theirs


_DOTTED_PREFIXES = (
    "",
    "transformer.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
)
# kohya's trainers, VideoX-Fun, OneTrainer, LyCORIS.
_JOINED_PREFIXES = ("lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_")


def file_spellings(name: str) -> Iterator[str]:
    """Yield a layer's name with each prefix that files put before it, with dots and with underscores."""
    yield from (f"{prefix}{name}" for prefix in _DOTTED_PREFIXES)
    yield from (f"{prefix}{name.replace('.', '_')}" for prefix in _JOINED_PREFIXES)


def layers_by_spelling(names: Iterator[str] | list[str], comfyui: LayerNames) -> dict[str, str]:
    """Return the layer that each spelling means, without spellings that could mean several."""
    found: dict[str, str] = {}
    several = set()
    for name in names:
        for spelling in set(spellings(name, comfyui)):
            if found.setdefault(spelling, name) != name:
                several.add(spelling)
    return {spelling: name for spelling, name in found.items() if spelling not in several}


def _renamed(names: Mapping[str, str], name: str) -> str | None:
    if name in names:
        return names[name]
    pattern, number = split_block_number(name)
    theirs = names.get(pattern) if number else None
    return theirs and theirs.replace("*", number)


def split_block_number(name: str) -> tuple[str, str]:
    """Split a layer's name into a pattern with `*` for the block's number, and that number; empty without a block."""
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        return name, ""
    return f"{name[: number.start(1)]}*{name[number.end(1) :]}", number[1]
