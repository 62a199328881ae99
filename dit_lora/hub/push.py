"""Pushes a run's result, card and samples in one commit. huggingface_hub does not send files that the Hub has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from dit_lora.config.experts import EXPERTS
from dit_lora.errors import DitLoraError
from dit_lora.files import write_whole
from dit_lora.hub.account import HubError, asked, check_account
from dit_lora.hub.card import write_card
from dit_lora.hub.contents import CARD, OURS, SAMPLES, VERIFICATION, Contents, collect
from dit_lora.results.experts import pair_file

Say = Callable[[str], None]


@dataclass(frozen=True)
class Publication:
    """All files of a run for its repository, including the card."""

    contents: Contents
    repo_id: str
    files: Mapping[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by path in the repository."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def prepare(run_dir: Path, repo_id: str) -> Publication:
    """Prepare what would be pushed. Writes the card to RUN/README.md for review; nothing is uploaded.

    Raises as `collect`.
    """
    contents = collect(run_dir)
    card = write_card(contents, repo_id)
    # Written before the upload, so that it can be reviewed even if the push fails.
    write_whole(run_dir / CARD, card)
    return Publication(contents, repo_id, {CARD: card.encode(), **contents.files})


def push(run_dir: Path, repo_id: str, *, private: bool, say: Say) -> str:
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
    publication = prepare(run_dir, repo_id)
    for line in listing(publication):
        say(line)
    try:
        check_account(repo_id, private=private)
        return _upload(publication, private=private, say=say)
    except HubError as error:
        command = f"dit-lora push {run_dir} {repo_id}{'' if private else ' --public'}"
        raise DitLoraError(f"{error}. Nothing is lost; go on with: {command}") from error


def _upload(publication: Publication, *, private: bool, say: Say) -> str:
    """Create the repository if needed and commit the files; retries transient errors."""
    api, repo_id = HfApi(), publication.repo_id
    # `exist_ok`: pushing again is normal. `private=None` leaves an organisation's default.
    asked(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True), say)
    url = f"{api.endpoint}/{repo_id}"
    return asked(lambda: _commit(api, publication, url, say), say)


def _commit(api: HfApi, publication: Publication, url: str, say: Say) -> str:
    """Commit all files on top of the newest commit; fails if another commit comes first.

    Unchanged files are skipped.
    """
    repo_id, files = publication.repo_id, publication.files
    # The commit that is built upon; the Hub answers 412 if it is no longer the newest.
    head = api.model_info(repo_id)
    existing = [item.rfilename for item in head.siblings or ()]
    # Only files that an earlier push wrote: others, such as pictures added by hand, stay.
    removes = [
        CommitOperationDelete(name) for name in existing if _is_ours(name) and name not in files
    ]
    # All files are added: huggingface_hub compares digests and does not send unchanged ones.
    adds = [CommitOperationAdd(name, content) for name, content in files.items()]
    visibility, size = "private" if head.private else "public", sum(publication.sizes().values())
    say(f"hub: {len(files)} files to {url}, which is {visibility} ({_size(size)})")
    metadata = publication.contents.made
    steps = sum(item.run.done for item in publication.contents.experts or (publication.contents,))
    commit = api.create_commit(
        repo_id,
        [*adds, *removes],
        commit_message=f"{metadata['family']}, {steps:,} steps, by dit-lora {metadata['version']}",
        parent_commit=head.sha,
    )
    # huggingface_hub makes no commit if nothing changed.
    if commit.oid == head.sha:
        return f"nothing to do: {url} has all {len(files)} files as they are here"
    return f"pushed {len(files)} files to {url}"


def _is_ours(name: str) -> bool:
    """True for file names that a push of ours may have written."""
    experts = EXPERTS.values()
    pairs = [file for expert in experts for file in (pair_file(expert), f"{expert}/{VERIFICATION}")]
    return name in (*OURS, VERIFICATION, *pairs) or name.startswith(SAMPLES)


def _size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def listing(publication: Publication) -> list[str]:
    """One line for each file of a push, with its size."""
    return [f"{_size(size):>10}  {name}" for name, size in sorted(publication.sizes().items())]
