"""Digests of the files that a verification saw, in verification.json: a file that changed since is told apart."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dit_lora.config.records import VerifiedFiles, checked, read_typed
from dit_lora.errors import CheckFailedError, DitLoraError
from dit_lora.files import open_regular, write_whole
from dit_lora.parsing import ParseError

VERIFICATION_FILE = "verification.json"


def digests_of(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the hex SHA-256 of files, by their paths relative to a run's folder."""
    return {file.relative_to(folder).as_posix(): _sha256(file) for file in sorted(files)}


def result_files(result: Path, part: str) -> list[Path]:
    """Return the files of an adapter's folder, or of a pipeline's trained part, that a verification reads."""
    folder = result / part if (result / part).is_dir() else result
    return [path for path in folder.iterdir() if path.suffix in (".safetensors", ".json")]


def changed_files(run: Path) -> list[str]:
    """Return the files of a run's result that are not those that were verified, by their digests.

    None for a run without verification.json, or with one of an earlier version, which has no digests.
    """
    try:
        stored = read_verification(run).get("files", {})
    except ParseError as error:
        raise DitLoraError(f"{error}; run dit-lora verify {run} again") from error
    return [
        name
        for name, digest in stored.items()
        if not (run / name).is_file() or _sha256(run / name) != digest
    ]


def read_verification(run: Path) -> VerifiedFiles:
    """Return what verification.json of a run says; empty if there is none. Raises `ParseError` if it is damaged."""
    record = run / VERIFICATION_FILE
    return (
        read_typed(record, VerifiedFiles)
        if record.is_file()
        else checked({}, VerifiedFiles, str(record))
    )


def require_file_as_verified(file: Path, what: str) -> None:
    """Raise what `require_as_verified` does, for a file that may be that of a run's adapter."""
    folder = file.absolute().parent
    if folder.name == "adapter":
        require_as_verified(folder.parent, what)


def require_as_verified(run: Path, what: str) -> None:
    """Raise `CheckFailedError`, in one line, if a file of a run's result changed since it was verified.

    `what` begins the message.
    """
    changed = changed_files(run)
    if changed:
        raise CheckFailedError(
            f"{what}: {', '.join(changed)} in {run} changed since it was verified (its digest differs from "
            f"{VERIFICATION_FILE}); restore it, or run dit-lora verify {run} again"
        )


def record_verification(run: Path, record: Mapping[str, Any]) -> None:
    """Write verification.json; raises `OSError`."""
    write_whole(run / VERIFICATION_FILE, json.dumps(record, indent=2) + "\n")


def _sha256(file: Path) -> str:
    with open_regular(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
