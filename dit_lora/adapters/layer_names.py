"""Names of a model's layers in LoRA files of other programs; each family defines the mapping."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class LayerNames:
    """How a program such as ComfyUI names a model's layers in LoRA files, or why it cannot load LoRAs of the model."""

    prefix: str = "diffusion_model."
    """Prefix of every name."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Maps Diffusers' names to the program's; `*` stands for a block's number. Empty if they are the same."""
    joined_layers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layers that the program has as one: its name to Diffusers' names, in the order of their output rows. `*` stands
    for a block's number."""
    unnamed_layers: tuple[str, ...] = ()
    """Patterns of layers that the program has no name for, and would ignore."""
    reads_alpha: bool = True
    """True if the program reads `.alpha` tensors. If not, alpha / rank is multiplied into B."""
    unsupported_reason: str = ""
    """The reason why the program cannot load LoRAs of this model; empty if it can."""

    def translate_layer_name(self, name: str) -> str | None:
        """Translate Diffusers' name of a layer to another program's name; None if that program has no such layer.

        A layer that the program joins with others has no name either.
        """
        if self.unsupported_reason or any(fnmatchcase(name, pattern) for pattern in self.unnamed_layers):
            return None
        if self.translate_joined_layer_name(name) is not None:
            return None
        if not self.renames or name in self.renames:
            return f"{self.prefix}{self.renames.get(name, name)}"
        # The mapping has one entry for all blocks.
        pattern, number = split_block_number(name)
        if not number or pattern not in self.renames:
            return None
        return f"{self.prefix}{self.renames[pattern].replace('*', number)}"

    def translate_joined_layer_name(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The program's name of the joined layer with this one, and all of Diffusers' layers in it, or None."""
        pattern, number = split_block_number(name)
        for joined, parts in self.joined_layers.items():
            if pattern in parts:
                key = f"{self.prefix}{joined.replace('*', number)}"
                return key, tuple(part.replace("*", number) for part in parts)
        return None


def make_unsupported_names(reason: str) -> LayerNames:
    """Create the `LayerNames` of a program that cannot load LoRAs of a model, with the reason."""
    return LayerNames(unsupported_reason=reason)


UNKNOWN_NAMES = make_unsupported_names("no names of ComfyUI are known here for this family")


def get_kohya_name(name: str) -> str:
    """Name of a layer in kohya's LoRA format, as VideoX-Fun reads and writes it."""
    # Two underscores: the layout joins its parts with underscores, and one part is empty.
    return f"lora_unet__{name.replace('.', '_')}"


def iterate_layer_spellings(name: str, comfyui: LayerNames) -> Iterator[str]:
    """Yield all names that LoRA files use for a layer: those of Diffusers, PEFT, ComfyUI, kohya and LyCORIS.

    Trainers of the published model write ComfyUI's names, which are those of that model; trainers of the Diffusers
    model write Diffusers'. kohya's layout has either with underscores.
    """
    comfyui_name = comfyui.translate_layer_name(name)
    unprefixed_name = name if comfyui_name is None else comfyui_name.removeprefix(comfyui.prefix)
    # Without duplicates: for many models both names are the same.
    for base_name in dict.fromkeys((name, unprefixed_name)):
        yield from iterate_prefixed_names(base_name)
    if comfyui_name is not None:
        yield comfyui_name


_DOTTED_PREFIXES = ("", "transformer.", "diffusion_model.", "model.diffusion_model.", "base_model.model.")
# kohya's trainers, VideoX-Fun, OneTrainer, LyCORIS.
_JOINED_PREFIXES = ("lora_unet_", "lora_unet__", "lora_transformer_", "lycoris_")


def iterate_prefixed_names(name: str) -> Iterator[str]:
    """Yield a layer's name with each prefix that LoRA files use, with dots and with underscores."""
    yield from (f"{prefix}{name}" for prefix in _DOTTED_PREFIXES)
    yield from (f"{prefix}{name.replace('.', '_')}" for prefix in _JOINED_PREFIXES)


def map_spellings_to_layers(names: Iterator[str] | list[str], comfyui: LayerNames) -> dict[str, str]:
    """Map each name that LoRA files may use to the model's layer.

    Names that could mean several layers are left out.
    """
    layers: dict[str, str] = {}
    ambiguous = set()
    for name in names:
        for spelling in set(iterate_layer_spellings(name, comfyui)):
            # A spelling of two layers cannot be resolved.
            if layers.setdefault(spelling, name) != name:
                ambiguous.add(spelling)
    return {spelling: name for spelling, name in layers.items() if spelling not in ambiguous}


def split_block_number(name: str) -> tuple[str, str]:
    """Split a layer's name into a pattern, with `*` for the block's number, and that number; empty without a block."""
    # The first number between dots is the block's; later ones are positions inside the block.
    number = re.search(r"\.(\d+)\.", name)
    if number is None:
        return name, ""
    return f"{name[: number.start(1)]}*{name[number.end(1) :]}", number[1]
