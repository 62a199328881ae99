"""Opens a recipe's checkpoint without its weights: configs from the folder or the Hub, models on the meta device.

The family's own code opens and builds the checkpoint; a config replaces the weights where they are missing.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from dit_lora.config.recipe import ModelConfig, Recipe
from dit_lora.environment.hub_files import model_folder
from dit_lora.environment.hub_kernels import configs_without_kernels
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.families import CHAT_FAMILIES, get_family
from dit_lora.families.base import Checkpoint

# Components with weights in every pipeline. Others are found by their config.json.
_WEIGHTS = ("transformer", "vae", "text_encoder")
_CONFIGS = ("*.json", "*.model", "*.txt", "*.jinja")


@contextmanager
def without_weights(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with a `model.path` from `configs_alone`."""
    with configs_alone(recipe.model) as model:
        yield recipe.model_copy(update={"model": model})


@contextmanager
def configs_alone(model: ModelConfig) -> Iterator[ModelConfig]:
    """The model config with a local path to the checkpoint's configs. Missing weight files are replaced by empty ones.

    For a Hub id, only the small files are downloaded. Raises `DitLoraError` if there is neither a folder nor a
    repository.
    """
    folder = Path(model.path).expanduser()
    if not folder.is_dir():
        folder = model_folder(model, _CONFIGS)
    # A complete local folder is used as it is. Chat families do not check for weight files when they are opened.
    elif model.family in CHAT_FAMILIES or not _lacking(folder):
        yield model
        return
    with tempfile.TemporaryDirectory() as temporary:
        # Keep the folder's name: some families read the training dtype from it.
        path = Path(temporary) / Path(model.path).name
        shutil.copytree(
            folder, path, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "*.ckpt", "*.pth")
        )
        for component in _lacking(path) if model.family not in CHAT_FAMILIES else ():
            (path / component).mkdir(exist_ok=True)
            # An empty file satisfies the check for weight files. Models are built from their configs.
            save_file({}, path / component / "model.safetensors")
        yield model.model_copy(update={"path": str(path)})


def _lacking(folder: Path) -> list[str]:
    """Pipeline components without weight files: those that every pipeline has, and all others with a config."""
    models = {*_WEIGHTS, *(config.parent.name for config in folder.glob("*/config.json"))}
    return sorted(name for name in models if not any((folder / name).glob("*.safetensors")))


@contextmanager
def from_configs() -> Iterator[list[nn.Module]]:
    """Inside the context, `from_pretrained` of Diffusers and Transformers builds frozen models from configs.

    Yields the list of the models built so far.
    """
    built: list[nn.Module] = []

    def of_diffusers(
        cls: Any, path: Any, *, subfolder: str | None = None, dtype: Any = None, **_: Any
    ) -> Any:
        # Parameters have the names of from_pretrained, whose callers pass them by keyword.
        model = cls.from_config(cls.load_config(path, subfolder=subfolder))
        return _as_loaded(model, dtype, cls._keep_in_fp32_modules or [], built)

    def of_transformers(cls: Any, path: Any, *, dtype: Any = None, **_: Any) -> Any:
        model = _without_values(cls, load_pretrained(cls.config_class, path))
        return _as_loaded(model, dtype, cls._keep_in_fp32_modules or [], built)

    replacements: dict[Any, Any] = {ModelMixin: of_diffusers, PreTrainedModel: of_transformers}
    originals: dict[Any, Any] = {kind: vars(kind)["from_pretrained"] for kind in replacements}
    for kind, function in replacements.items():
        # Patch the base classes, so that every model class of both libraries is covered.
        kind.from_pretrained = classmethod(function)
    try:
        yield built
    finally:
        for kind, method in originals.items():
            kind.from_pretrained = method


def _as_loaded(
    model: nn.Module, dtype: torch.dtype | None, fp32: list[str], built: list[nn.Module]
) -> nn.Module:
    for name, parameter in model.named_parameters():
        # Modules that the class keeps in fp32 stay so, as in a real from_pretrained.
        if not any(part in name.split(".") for part in fp32):
            parameter.data = parameter.data.to(dtype or torch.float32)
    set_method: Any = setattr
    set_method(model, "to", lambda *_, **__: model)  # meta and fake weights cannot be moved
    built.append(model.requires_grad_(False).eval())
    return model


def text_encoders(path: Path, dtype: torch.dtype) -> list[nn.Module]:
    """Build the text encoders of a Diffusers folder that have a config, each of the class that the config names."""
    import transformers

    models = []
    # text_encoder, text_encoder_2 and so on, in this order.
    for file in sorted(path.glob("text_encoder*/config.json")):
        config = load_pretrained(AutoConfig, file.parent)
        model = _without_values(getattr(transformers, config.architectures[0]), config)
        models.append(_as_loaded(model, dtype, [], []))
    return models


def _without_values(cls: Any, config: Any) -> Any:
    """Build a Transformers model without initialising its weights.

    Some initialisations (Siglip's) read values, which tensors on the meta device do not have.
    """
    with no_init_weights(), configs_without_kernels():
        model = cls._from_config(config)
    model.tie_weights()  # skipped together with the initialisation
    return model


def opened(recipe: Recipe) -> tuple[Any, Any]:
    """Family and checkpoint of a recipe from `without_weights`. Without its data, it has the checkpoint's classes."""
    family, is_chat = get_family(recipe.model.family), recipe.model.family in CHAT_FAMILIES
    if not data_is_here(recipe) and recipe.data.classes is None and not is_chat:
        recipe = _with_classes(recipe, family.open(recipe.model))
    return family, family.open(recipe.model, recipe)


def data_is_here(recipe: Recipe) -> bool:
    """True if every data source is a file or folder on this machine."""
    return all(Path(source.path).expanduser().exists() for source in recipe.data.all_sources)


def _with_classes(recipe: Recipe, checkpoint: Checkpoint) -> Recipe:
    stored_names = checkpoint.class_names
    if stored_names is None:
        return recipe
    # Any valid class will do: only the number of rows and the shapes matter here.
    names = tuple(recipe.validation.prompts) or tuple(stored_names[:1]) or ("class",)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": names})})


def as_constructed(model: nn.Module) -> nn.Module:
    """Let a model from `from_configs` be moved to a device again, like any other model."""
    model.__dict__.pop("to", None)
    return model.eval()
