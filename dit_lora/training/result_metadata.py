"""Metadata that a run writes into the header of its result and of the adapters at its saves."""

from pathlib import Path
from typing import Any

from dit_lora.adapters.attach import ADAPTER_NAME
from dit_lora.adapters.kinds import get_alpha
from dit_lora.adapters.start import build_config_for_saving
from dit_lora.config.lora import WEIGHT_INITS
from dit_lora.config.remedies import HUB_PREFIX
from dit_lora.environment.versions import probe_environment
from dit_lora.redact import redact_value
from dit_lora.training.task import AnySetup, Setup
from dit_lora.verify.checks import PATTERN_KEYS
from dit_lora.version import __version__


def build_metadata(setup: Setup[Any, Any]) -> dict[str, Any]:
    """Metadata for the adapter's header. A local checkpoint is named without its parent folders."""
    recipe, path = setup.recipe, Path(setup.recipe.model.path).expanduser()
    metadata = {
        "version": __version__,
        "family": recipe.model.family,
        "base_model": path.resolve().name if path.is_dir() else recipe.model.path.removeprefix(HUB_PREFIX),
        "revision": recipe.model.revision,
        "transformer_digest": setup.data.transformer_digest,
        **_describe_lora(setup),
        **{key: getattr(recipe.train, key) for key in ("steps", "ema", "seed")},
        "dtype": str(setup.dtype),
        "quantize": recipe.model.quantize,
        **setup.task.build_metadata(setup),
        "packages": dict(probe_environment().versions),
    }
    # The header is published: paths and names of users stay out of it.
    return dict(redact_value(metadata))


def _describe_lora(setup: AnySetup) -> dict[str, Any]:
    recipe = setup.recipe
    if recipe.train.mode == "full":
        return {"mode": "full"}
    lora = recipe.lora
    # No adapter is attached: the values are the recipe's.
    if recipe.optim.groups.adapter is None:
        return {"rank": lora.rank, "alpha": lora.alpha or lora.rank, "dropout": lora.dropout}
    config = build_config_for_saving(setup.transformer, ADAPTER_NAME).to_dict()
    # Checkpoints and files from before `kind` existed describe a LoRA without it: they must still match.
    facts: dict[str, Any] = {} if lora.kind == "lora" else {"kind": lora.kind}
    # Its size is that of a block; it has neither rank nor alpha.
    if lora.kind == "oft":
        return {**facts, "block_size": config["oft_block_size"]}
    facts |= {"rank": config["r"], "alpha": get_alpha(config)}
    facts |= {"dropout": lora.dropout} if "dropout" in lora.supported_options else {}
    facts |= {"init": lora.init} if lora.init in WEIGHT_INITS else {}
    facts |= {"rslora": True} if config.get("use_rslora") else {}
    facts |= {"factor": lora.factor} if lora.factor else {}
    # Layers whose rank or alpha differs from the common value.
    return facts | {key: dict(config[key]) for key in PATTERN_KEYS if config[key]}
