"""Opens the folder of a Diffusers checkpoint: its index, its components' configs, their weights whole, the transformer."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import read_typed
from dit_lora.environment.hub_files import model_folder
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, listed

_BESIDE_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")


def local_checkpoint(model: ModelConfig) -> Path:
    """Return the Diffusers folder of `model.path`, fetched from the Hub if it is not a local one."""
    # Of its components alone: many a repository has the same weights in its root too, for other programs.
    return model_folder(model, ("*/*.safetensors", *_BESIDE_WEIGHTS))


def local_chat_checkpoint(model: ModelConfig) -> Path:
    """Return the Transformers folder of `model.path`, whose weights lie in its root, fetched likewise."""
    return model_folder(model, ("model*.safetensors", *_BESIDE_WEIGHTS))


def read_index(model: ModelConfig, path: Path, pipelines: Sequence[str]) -> dict[str, Any]:
    """Read the model_index.json of a folder; refuse one of another pipeline than the family's."""
    index = read_component_config(path)
    pipeline_class = index.get("_class_name")
    if pipeline_class not in pipelines:
        raise DitLoraError(
            f"{model.path} is a {pipeline_class} checkpoint; family {model.family} trains {' and '.join(pipelines)}"
        )
    return index


def stored_fields(model: ModelConfig, path: Path) -> dict[str, Any]:
    """Return the fields of an opened checkpoint that most families read alike: all but the objective."""
    scratch, part = model.from_scratch, part_of(model, path)
    return {
        "path": path,
        "part": part,
        "transformer_config": {**read_component_config(path, part), **(scratch or {})},
        "vae_config": read_component_config(path, "vae"),
        "from_scratch": scratch,
    }


def with_defaults(model_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config over its class's defaults: files from before an option lack it."""
    parameters = inspect.signature(model_class.__init__).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return defaults | dict(config)


def part_of(model: ModelConfig, path: Path) -> str:
    """Return the component that `model.part` names, the first of both; refuse a second one that the pipeline lacks."""
    second = read_component_config(path).get("transformer_2")
    has_two = isinstance(second, list) and None not in second
    if model.part in ("transformer_2", "both") and not has_two:
        raise DitLoraError(
            f"model.part: {model.path} has one transformer (no transformer_2 in its model_index.json); "
            "leave model.part out"
        )
    return "transformer_2" if model.part == "transformer_2" else "transformer"


def require_whole_weights(model: ModelConfig, path: Path, *components: str) -> None:
    """Refuse a checkpoint of which one of these, or a transformer that is not drawn, lacks bytes of its weights.

    All that is wrong is listed. Reads headers only, before anything is encoded with one half of a checkpoint.
    """
    wrong = []
    transformer = (part_of(model, path),) if model.from_scratch is None else ()
    for component in (*transformer, *components):
        files = sorted((path / component).glob("*.safetensors"))
        if not files:
            wrong.append(f"{component}: no .safetensors file")
        for file in files:
            try:
                with safe_open(file, framework="pt"):
                    pass
            except (OSError, SafetensorError) as error:
                wrong.append(f"{component}/{file.name}: {error}")
    if wrong:
        raise DitLoraError(listed(f"{path} is not whole; fetch these files again", wrong))


def load_or_init(
    model_class: Any,
    path: Path,
    dtype: torch.dtype,
    scratch: Mapping[str, Any] | None,
    part: str = "transformer",
) -> Any:
    """The frozen transformer of a checkpoint, or random by its config with `scratch` over it; on the CPU.

    Random weights are drawn from torch's generator in fp32 and then rounded; buffers stay as they are.
    """
    if scratch is None:
        # dtype= and not .to(): .to() would round position tables as well.
        return load_pretrained(
            model_class, path, subfolder=part, dtype=dtype, use_safetensors=True
        ).requires_grad_(False)
    arguments = sorted(set(inspect.signature(model_class.__init__).parameters) - {"self"})
    unknown = sorted(set(scratch) - set(arguments))
    if unknown:
        name = model_class.__name__
        raise DitLoraError(
            listed(f"model.from_scratch: {name} has no {', '.join(unknown)}; it has", arguments)
        )
    try:
        model = model_class.from_config({**read_component_config(path, part), **scratch})
    except (TypeError, ValueError) as error:
        raise DitLoraError(f"model.from_scratch: {error}; got {dict(scratch)}") from error
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False)


def default_of(pipeline_class: Any, argument: str) -> Any:
    """Return the default of an argument of a pipeline's own call."""
    return inspect.signature(pipeline_class.__call__).parameters[argument].default


def read_component_config(path: Path, component: str = "") -> dict[str, Any]:
    """A component's config.json (`model_index.json` for the pipeline itself), as a dict."""
    if not component:
        return read_config(path, "model_index.json", "Diffusers")
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return read_config(path, f"{component}/{name}", "Diffusers")


def read_config(path: Path, name: str, library: str) -> dict[str, Any]:
    """Read a JSON file of a checkpoint in the format of that library."""
    file = path / name
    try:
        return read_typed(file, dict[str, Any])
    except FileNotFoundError as error:
        raise DitLoraError(
            f"{path} is not a {library} checkpoint: it has no {file.relative_to(path)}"
        ) from error
    except (OSError, ValueError) as error:
        raise DitLoraError(f"cannot read {file}: {error}") from error
