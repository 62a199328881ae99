"""Find the LoRA file that a recipe names: a file, a folder, or a repository on the Hub."""

from pathlib import Path

from peft.utils import SAFETENSORS_WEIGHTS_NAME

from dit_lora.adapters.diffusers_format import ADAPTER_FILE, BASE_FILE
from dit_lora.config.remedies import HUB, hub_hint, hub_name, looks_local
from dit_lora.environment.hub_files import result_folder
from dit_lora.errors import DitLoraError, listed

_SUFFIX = ".safetensors"


def find_lora(named: str, option: str) -> Path:
    """The path of the LoRA file; `option` is the recipe's key, for messages.

    In a folder (of a run or an adapter) it is Diffusers' or PEFT's file, or the only safetensors file. A repository is
    OWNER/NAME, or OWNER/NAME/FILE.safetensors if it has several files. Raises `DitLoraError` if there is no LoRA or
    several, or if base weights were saved with it.
    """
    path = Path(named).expanduser()
    if path.is_file():
        file = path
    elif path.is_dir():
        file = _in_folder(path, named, option)
    else:
        file = _on_hub(named, option)
    # Other formats, such as .pt, are pickles, which can run code.
    if file.suffix != _SUFFIX:
        raise DitLoraError(
            f"{option}: {named} is no {_SUFFIX} file, the one form that holds no code; convert it first"
        )
    if (
        file.name in (ADAPTER_FILE, SAFETENSORS_WEIGHTS_NAME)
        and file.with_name(BASE_FILE).is_file()
    ):
        raise DitLoraError(
            f"{option}: {named} has base weights beside its LoRA ({BASE_FILE}), which a LoRA alone leaves out; write "
            "both into a checkpoint (dit-lora export --to merged) and start from that"
        )
    return file


def public_name(named: str) -> str:
    """A name for headers that others read: the Hub id, or the last part of a local path."""
    path = Path(named).expanduser()
    return path.resolve().name if path.exists() else named.removeprefix(HUB)


def _in_folder(folder: Path, named: str, option: str) -> Path:
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
        message = f"{option}: {named} has several files; name one of them"
        raise DitLoraError(listed(message, [path.name for path in files]))
    raise DitLoraError(
        f"{option}: no LoRA in {named}: no {ADAPTER_FILE}, and no other {_SUFFIX} file"
    )


def _on_hub(named: str, option: str) -> Path:
    # OWNER/NAME/FILE, with three parts; OWNER/NAME has two.
    *repository, file_name = named.split("/")
    name, pattern = "/".join(repository), file_name
    if file_name.endswith(_SUFFIX) and len(repository) == 2 and not looks_local(name):
        file = result_folder(f"{HUB}{name.removeprefix(HUB)}", (pattern,)) / pattern
        return file
    if hub_name(named) is None:
        starts = "; a start is kaiming, gaussian, or a LoRA to continue from"
        hint = hub_hint(named) or (starts if option == "lora.init" else "")
        raise DitLoraError(f"{option}: no file or folder {named}{hint}")
    folder = result_folder(named, (f"*{_SUFFIX}", "adapter_config.json"))
    return _in_folder(folder, named, option)
