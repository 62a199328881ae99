"""SHA-256 digests of the verified files, stored in verification.json, to detect files that changed since."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dit_lora.config.records import VerifiedFiles, read_typed_json, validate_value
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.files import compute_sha256, write_json
from dit_lora.parsing import ParseError

VERIFICATION_FILE = "verification.json"


def compute_digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 (hex) of each file of a run, by its path relative to the run's folder."""
    return {file.relative_to(folder).as_posix(): compute_sha256(file) for file in sorted(files)}


def list_result_files(result: Path, part: str) -> list[Path]:
    """Files that a verification reads: those of an adapter's folder, or of a pipeline's trained component."""
    # A pipeline has one folder per component; an adapter's folder has no such subfolder.
    folder = result / part if (result / part).is_dir() else result
    return [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]


def find_changed_files(run: Path) -> list[str]:
    """Files of a run's result whose SHA-256 differs from the verified one. Missing files count as changed.

    Empty without verification.json, and for one of an earlier version without digests.
    """
    try:
        # Digests by path relative to the run's folder, from the last verification.
        digests = read_verification(run).get("files", {})
    except ParseError as error:
        raise DitLoraError(f"{error}; run dit-lora verify {run} again") from error
    return [
        name for name, digest in digests.items() if not (run / name).is_file() or compute_sha256(run / name) != digest
    ]


def read_verification(run: Path) -> VerifiedFiles:
    """Contents of a run's verification.json; empty if there is none. Raises `ParseError` if it is damaged."""
    # Runs of earlier versions may have none.
    record = run / VERIFICATION_FILE
    if not record.is_file():
        return validate_value({}, VerifiedFiles, str(record))
    return read_typed_json(record, VerifiedFiles)


def require_file_unchanged(file: Path, message_prefix: str) -> None:
    """Raise `CheckFailedError` if the run that this adapter file belongs to has changed since it was verified.

    Nothing happens for files outside a run.
    """
    folder = file.absolute().parent
    if folder.name == "adapter":
        require_result_unchanged(folder.parent, message_prefix)


def require_result_unchanged(run: Path, message_prefix: str) -> None:
    """Raise `CheckFailedError`, in one line, if a file of a run's result changed since it was verified.

    `message_prefix` is the beginning of the message.
    """
    changed = find_changed_files(run)
    if changed:
        raise CheckFailedError(
            f"{message_prefix}: {', '.join(changed)} in {run} changed since it was verified (its digest differs from "
            f"{VERIFICATION_FILE}); restore it, or run dit-lora verify {run} again"
        )


def write_verification(run: Path, record: Mapping[str, Any]) -> None:
    """Write a run's verification.json. Raises `OSError`."""
    write_json(run / VERIFICATION_FILE, record)
