"""Load whatever a checkpoint holds: no code of it is run, and of a folder nothing but the folder is read.

Transformers asks on standard input whether to run the code that a config names, unless it is told before.
"""

from pathlib import Path
from typing import Any

from dit_lora.config.remedies import hub_name
from dit_lora.errors import DitLoraError
from dit_lora.parsing import read_json


def load_pretrained(kind: Any, source: str | Path, **options: Any) -> Any:
    """Return `kind.from_pretrained` of a folder, or of a name on the Hub given as text.

    Raises `DitLoraError` where it cannot be loaded without code of the checkpoint's own, and for a folder that is
    not there.
    """
    from diffusers import ModelMixin

    name, folder = None, Path(source).expanduser()
    if not folder.is_dir():
        name = hub_name(source) if isinstance(source, str) else None
        if name is None:
            raise DitLoraError(f"no folder {source} to load from")
    else:
        _refuse_kernels(folder)
    # Diffusers' models are of the class that is asked, and take no such option.
    if not issubclass(kind, ModelMixin):
        options["trust_remote_code"] = False
    try:
        return kind.from_pretrained(name or folder, local_files_only=name is None, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise _own_code(folder) from error


def built_from(kind: Any, config: Any, **options: Any) -> Any:
    """Return `kind.from_config` of a config, for an Auto class; raises as `load_pretrained`."""
    try:
        return kind.from_config(config, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise _own_code(Path(config.name_or_path)) from error


def _own_code(source: Path) -> DitLoraError:
    return DitLoraError(
        f"{source} can only be loaded by code of its own, which is never run, whoever says yes to it: give a "
        "checkpoint whose classes Diffusers or Transformers has, without auto_map or Python files"
    )


def _refuse_kernels(folder: Path) -> None:
    """Raise if a config names an attention that Transformers would fetch from the Hub as code."""
    file = folder / "config.json"
    try:
        config = read_json(file) if file.is_file() else {}
    except (OSError, ValueError):
        return  # what reads it will say so
    parts = [config, *config.values()] if isinstance(config, dict) else []
    for part in parts:
        wanted = part.get("attn_implementation") if isinstance(part, dict) else None
        if "/" in str(wanted or ""):
            raise DitLoraError(
                f"{file}: attn_implementation {wanted!r} is code from the Hub, which is never run; remove it"
            )
