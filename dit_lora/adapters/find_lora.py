"""Find the LoRA file that a recipe names: a file, a folder, or a repository on the Hub."""

from pathlib import Path

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.config.remedies import HUB_PREFIX, get_hub_name, is_likely_local, suggest_hub_prefix
from dit_lora.environment.hub_files import resolve_result_folder
from dit_lora.errors import DitLoraError, format_list

_SUFFIX = ".safetensors"


def find_lora(location: str, option: str) -> Path:
    """Path of the LoRA file that a path or Hub name refers to. `option` is the recipe's key, for messages.

    In a folder (of a run or an adapter) it is Diffusers' or PEFT's file, or the only safetensors file. A repository is
    OWNER/NAME, or OWNER/NAME/FILE.safetensors if it has several files. Raises `DitLoraError` if there is no LoRA or
    several, or if base weights were saved with it.
    """
    path = Path(location).expanduser()
    if path.is_file():
        file = path
    elif path.is_dir():
        file = _find_in_folder(path, location, option)
    else:
        file = _find_on_hub(location, option)
    # Other formats, such as .pt, are pickles, which can run code.
    if file.suffix != _SUFFIX:
        raise DitLoraError(
            f"{option}: {location} is not a {_SUFFIX} file; convert it first, because other formats can run code"
        )
    if file.name in (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME) and file.with_name(BASE_FILE).is_file():
        raise DitLoraError(
            f"{option}: {location} also has trained base weights ({BASE_FILE}), which cannot be loaded as a "
            "LoRA; export both to a checkpoint (dit-lora export --to merged) and start from that"
        )
    return file


def get_public_name(location: str) -> str:
    """Name of a model or data set for headers that others read: the Hub id, or the last part of a local path."""
    path = Path(location).expanduser()
    return path.resolve().name if path.exists() else location.removeprefix(HUB_PREFIX)


def _find_in_folder(folder: Path, location: str, option: str) -> Path:
    # A run keeps its adapter in the subfolder `adapter`.
    for directory in (folder, folder / "adapter"):
        for name in (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME):
            if (directory / name).is_file():
                return directory / name
    # A file of another program may have any name.
    files = [path for path in sorted(folder.glob(f"*{_SUFFIX}")) if path.name != BASE_FILE]
    if len(files) == 1:
        return files[0]
    if files:
        message = f"{option}: {location} has several files; name one of them"
        raise DitLoraError(format_list(message, [path.name for path in files]))
    raise DitLoraError(f"{option}: no LoRA in {location}: no {ADAPTER_FILE}, and no other {_SUFFIX} file")


def _find_on_hub(location: str, option: str) -> Path:
    # OWNER/NAME/FILE, with three parts; OWNER/NAME has two.
    *repository, file_name = location.split("/")
    name = "/".join(repository)
    if file_name.endswith(_SUFFIX) and len(repository) == 2 and not is_likely_local(name):
        return resolve_result_folder(f"{HUB_PREFIX}{name.removeprefix(HUB_PREFIX)}", (file_name,)) / file_name
    if get_hub_name(location) is None:
        starts = "; give kaiming, gaussian, or a LoRA to continue from"
        hint = suggest_hub_prefix(location) or (starts if option == "lora.init" else "")
        raise DitLoraError(f"{option}: {location} does not exist{hint}")
    folder = resolve_result_folder(location, (f"*{_SUFFIX}", "adapter_config.json"))
    return _find_in_folder(folder, location, option)
