"""Opens the folder of a Diffusers checkpoint: pipeline index, component configs, weight files and transformer."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dit_lora.config.recipe import ModelConfig
from dit_lora.config.records import read_typed_json
from dit_lora.environment.hub_files import resolve_model_folder
from dit_lora.environment.pipeline_index import INDEX_FILE, find_index_file
from dit_lora.environment.pretrained import load_pretrained
from dit_lora.errors import DitLoraError, format_list

# Configs, sentencepiece models, vocabularies and chat templates.
_CONFIG_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")


def get_checkpoint_folder(model: ModelConfig) -> Path:
    """Local Diffusers folder of `model.path`, downloaded from the Hub if it is not a local path."""
    # Only the component folders: many repositories have the same weights at their top level too, for other programs.
    return resolve_model_folder(model, ("*/*.safetensors", *_CONFIG_PATTERNS))


def get_chat_checkpoint_folder(model: ModelConfig) -> Path:
    """Local Transformers folder of `model.path`, with weights at its top level; downloaded if not a local path."""
    # Transformers names its weights model.safetensors, or model-00001-of-0000N.safetensors in shards.
    return resolve_model_folder(model, ("model*.safetensors", *_CONFIG_PATTERNS))


def read_checkpoint(
    model: ModelConfig,
    pipelines: Sequence[str],
    *,
    weights: Sequence[str] | None = ("vae", "text_encoder"),
    transformer_class: Any = None,
    vae_class: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the index and configs of a Diffusers folder, downloaded from the Hub if `model.path` is not a local folder.

    Args:
        model: The `model` section of a recipe.
        pipelines: The pipeline classes that the family trains, `DiffusionFamily.pipeline_names`.
        weights: Components whose weight files must be complete, as the transformer's must be. None if the caller has
            to read the configs first; it then calls `require_complete_weights`.
        transformer_class: Class whose defaults fill the transformer's config: older files lack newer options.
        vae_class: Class whose defaults fill the VAE's config.

    Returns:
        The pipeline's index, and the fields of `CheckpointInfo` that are read the same way for all families.

    Raises:
        DitLoraError: The pipeline is not one of `pipelines`, or a file is missing or damaged.
    """
    path = get_checkpoint_folder(model)
    index = read_component_config(path)
    pipeline_class = index.get("_class_name")
    if pipeline_class not in pipelines:
        raise DitLoraError(
            f"{model.path} is a {pipeline_class} checkpoint; family {model.family} trains {' and '.join(pipelines)}"
        )
    if weights is not None:
        require_complete_weights(model, path, *weights)
    # `model.from_scratch` overrides the stored config of the transformer that is trained.
    part = select_component(model, path)
    transformer_config = {**read_component_config(path, part), **(model.from_scratch or {})}
    vae_config = read_component_config(path, "vae")
    return index, {
        "path": path,
        "part": part,
        "transformer_config": fill_config_defaults(transformer_class, transformer_config),
        "vae_config": fill_config_defaults(vae_class, vae_config),
        "from_scratch": model.from_scratch,
    }


def build_empty_pipeline(pipeline_class: Any) -> Any:
    """A pipeline without components, for reading its prompt template and calling its helpers."""
    parameters = inspect.signature(pipeline_class.__init__).parameters
    return pipeline_class(**{name: None for name in parameters if name != "self"})


def fill_config_defaults(model_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a config with its class's defaults: files written before an option existed lack it. None fills nothing."""
    if model_class is None:
        return dict(config)
    parameters = inspect.signature(model_class.__init__).parameters
    # Parameters without a default, such as `self`, have no value to fill in.
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    return defaults | dict(config)


def select_component(model: ModelConfig, path: Path) -> str:
    """The component to train by `model.part`; `both` gives the first. Raises `DitLoraError` if it is missing."""
    second = read_component_config(path).get("transformer_2")
    # An absent component is missing from the index, or is [null, null].
    has_two = isinstance(second, list) and None not in second
    if model.part in ("transformer_2", "both") and not has_two:
        raise DitLoraError(
            f"model.part does not apply: {model.path} has one transformer (no transformer_2 in its index); remove it"
        )
    return "transformer_2" if model.part == "transformer_2" else "transformer"


def require_complete_weights(model: ModelConfig, path: Path, *components: str) -> None:
    """Raise `DitLoraError` if weight files of the transformer or of these components are missing or truncated.

    All problems are listed. Only file headers are read, so this runs before any sample is encoded. With
    `model.from_scratch` the transformer's files are not needed.
    """
    problems = []
    # The weights of the other expert are not needed unless the caller lists them.
    transformer = (select_component(model, path),) if model.from_scratch is None else ()
    for component in (*transformer, *components):
        files = sorted((path / component).glob("*.safetensors"))
        if not files:
            problems.append(f"{component}: no .safetensors file")
        for file in files:
            try:
                # Opening checks the header against the file's size, so a truncated file fails here.
                with safe_open(file, framework="pt"):
                    pass
            except (OSError, SafetensorError) as error:
                problems.append(f"{component}/{file.name}: {error}")
    if problems:
        raise DitLoraError(format_list(f"{path} is incomplete; download these files again", problems))


def load_or_init_transformer(
    model_class: Any, path: Path, dtype: torch.dtype, from_scratch: Mapping[str, Any] | None, part: str = "transformer"
) -> Any:
    """Load the frozen transformer on the CPU, or build a random one if `from_scratch` is given.

    Random weights are drawn in fp32 from torch's default generator and then rounded to `dtype`; buffers stay as they
    are.

    Args:
        model_class: The Diffusers model class.
        path: Folder of the checkpoint.
        dtype: Dtype of the weights.
        from_scratch: `model.from_scratch`, config changes for a random model. None to load the weights.
        part: The component, `transformer` or `transformer_2`.

    Raises:
        DitLoraError: Weights are missing, or `from_scratch` has an unknown option or an invalid value.
    """
    if from_scratch is None:
        # Pass dtype instead of calling .to(), which would also round position tables.
        model = load_pretrained(model_class, path, subfolder=part, dtype=dtype, use_safetensors=True)
        # Diffusers leaves weights that the files lack on the meta device. A plan builds all of them there.
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if 0 < len(missing) < sum(1 for _ in model.parameters()):
            problem = f"the files in {path / part} lack weights of {model_class.__name__}, or name them otherwise"
            raise DitLoraError(format_list(problem, missing))
        return model.requires_grad_(False)
    # from_config ignores unknown options with a warning, so a misspelled one must be rejected here.
    arguments = sorted(set(inspect.signature(model_class.__init__).parameters) - {"self"})
    unknown = sorted(set(from_scratch) - set(arguments))
    if unknown:
        name = model_class.__name__
        raise DitLoraError(format_list(f"model.from_scratch: {name} has no {', '.join(unknown)}; it has", arguments))
    try:
        model = model_class.from_config({**read_component_config(path, part), **from_scratch})
    except (TypeError, ValueError) as error:
        raise DitLoraError(f"model.from_scratch: {error}; got {dict(from_scratch)}") from error
    # Only parameters are rounded. Buffers may be position tables that must stay in fp32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.requires_grad_(False)


def get_call_default(pipeline_class: Any, argument: str) -> Any:
    """Default value of an argument of the pipeline's `__call__`."""
    return inspect.signature(pipeline_class.__call__).parameters[argument].default


def read_component_config(path: Path, component: str = "") -> dict[str, Any]:
    """Read a component's config.json as a dict; the pipeline's index if `component` is empty."""
    if not component:
        return read_config(path, (find_index_file(path) or path / INDEX_FILE).name, "Diffusers")
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    return read_config(path, f"{component}/{name}", "Diffusers")


def read_config(path: Path, name: str, library: str) -> dict[str, Any]:
    """Read a JSON file of a checkpoint. Raises `DitLoraError`, naming the `library`, if it is missing or invalid."""
    file = path / name
    try:
        return read_typed_json(file, dict[str, Any])
    # A missing file usually means a wrong folder. A `ParseError` names the file itself.
    except FileNotFoundError as error:
        raise DitLoraError(f"{path} is not a {library} checkpoint: it has no {file.relative_to(path)}") from error
    except OSError as error:
        raise DitLoraError(f"cannot read {file}: {error.strerror or error}") from error
