"""Pushes a run's result, card and samples in one commit. huggingface_hub does not send files that the Hub has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from dit_lora.config.experts import EXPERT_NAMES
from dit_lora.config.records import parse_typed_json
from dit_lora.environment.pipeline_index import MODULAR_INDEX_FILE, set_component_source
from dit_lora.errors import DitLoraError
from dit_lora.files import read_regular_file, write_atomically
from dit_lora.hub.account import HubError, check_account, request_with_retries
from dit_lora.hub.card import write_card
from dit_lora.hub.cleaning import redact_json
from dit_lora.hub.contents import (
    ADAPTER_FILES,
    CARD_FILE,
    SAMPLES_PREFIX,
    VERIFICATION_FILE,
    PublishedContents,
    collect_contents,
)
from dit_lora.verify.expert_pair import format_expert_filename


@dataclass(frozen=True)
class Publication:
    """All files of a run for its repository, including the card."""

    contents: PublishedContents
    repo_id: str
    files: Mapping[str, Path | bytes]

    def get_sizes(self) -> dict[str, int]:
        """Bytes of each file of a push, by path in the repository."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def prepare_publication(run_dir: Path, repo_id: str) -> Publication:
    """Prepare what would be pushed. Writes the card to RUN/README.md for review; nothing is uploaded.

    Raises as `collect_contents`.
    """
    contents = collect_contents(run_dir)
    card = write_card(contents, repo_id)
    # Written before the upload, so that it can be reviewed even if the push fails.
    write_atomically(run_dir / CARD_FILE, card)
    files = {CARD_FILE: card.encode(), **contents.files}
    index = files.get(MODULAR_INDEX_FILE)
    if index is not None:
        # On the Hub, a modular index must name the repository that has the components.
        content = index if isinstance(index, bytes) else read_regular_file(index)
        values = parse_typed_json(content, dict[str, Any], MODULAR_INDEX_FILE)
        files[MODULAR_INDEX_FILE] = redact_json(set_component_source(values, repo_id)).encode()
    return Publication(contents, repo_id, files)


def push(run_dir: Path, repo_id: str, *, private: bool, say: Callable[[str], None]) -> str:
    """Upload a run to a repository, which is created if needed. Returns the outcome in one line.

    In one commit, new and changed files are sent, and files of an earlier push that this run does not have are
    removed.

    Args:
        run_dir: The run.
        repo_id: The repository.
        private: A new repository is private, and an existing public one is rejected.
        say: Called with messages, first a list of the files.

    Raises:
        DitLoraError: With the command that continues; files that were sent already are not sent again.
    """
    publication = prepare_publication(run_dir, repo_id)
    for line in list_files(publication):
        say(line)
    try:
        check_account(repo_id, private=private)
        api = HfApi()
        # `exist_ok`: pushing again is normal. `private=None` leaves an organisation's default.
        request_with_retries(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True), say)
        url = f"{api.endpoint}/{repo_id}"
        return request_with_retries(lambda: _commit_files_to_hub(api, publication, url, say), say)
    except HubError as error:
        command = f"dit-lora push {run_dir} {repo_id}{'' if private else ' --public'}"
        raise DitLoraError(f"{error}. Nothing is lost. To continue: {command}") from error


def _commit_files_to_hub(api: HfApi, publication: Publication, url: str, say: Callable[[str], None]) -> str:
    """Commit all files of a push on top of the newest commit; fails if another commit comes first."""
    repo_id, files = publication.repo_id, publication.files
    # The commit that is built upon; the Hub answers 412 if it is no longer the newest.
    head = api.model_info(repo_id)
    existing = [item.rfilename for item in head.siblings or ()]
    # Only files that an earlier push may have written: others, such as pictures added by hand, stay.
    pushed_names = {*ADAPTER_FILES, VERIFICATION_FILE}
    for expert in EXPERT_NAMES.values():
        pushed_names |= {format_expert_filename(expert), f"{expert}/{VERIFICATION_FILE}"}
    removes = [
        CommitOperationDelete(name)
        for name in existing
        if (name in pushed_names or name.startswith(SAMPLES_PREFIX)) and name not in files
    ]
    # All files are added: huggingface_hub compares digests and does not send unchanged ones.
    adds = [CommitOperationAdd(name, content) for name, content in files.items()]
    visibility, size = ("private" if head.private else "public", sum(publication.get_sizes().values()))
    say(f"hub: sending {len(files)} files to {url}, which is {visibility} ({_format_size(size)})")
    metadata = publication.contents.metadata
    steps = sum(item.run.num_steps_taken for item in publication.contents.experts or (publication.contents,))
    commit = api.create_commit(
        repo_id,
        [*adds, *removes],
        commit_message=f"{metadata['family']}, {steps:,} steps, by dit-lora {metadata['version']}",
        parent_commit=head.sha,
    )
    # huggingface_hub makes no commit if nothing changed.
    if commit.oid == head.sha:
        return f"nothing to send: {url} already has all {len(files)} files"
    return f"pushed {len(files)} files to {url}"


def _format_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def list_files(publication: Publication) -> list[str]:
    """One line for each file of a push, with its size."""
    return [f"{_format_size(size):>10}  {name}" for name, size in sorted(publication.get_sizes().items())]
