"""Push a run's result, card and samples in one commit; huggingface_hub does not send again what the Hub has."""

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
    """All files of a run that a repository gets, with the card."""

    contents: Contents
    repo_id: str
    files: Mapping[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its place in the repository."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def prepare(run_dir: Path, repo_id: str) -> Publication:
    """Return what would be pushed; its card is written to RUN/README.md, to be looked at. Nothing goes online.

    Raises as `collect`.
    """
    contents = collect(run_dir)
    card = write_card(contents, repo_id)
    write_whole(run_dir / CARD, card)
    return Publication(contents, repo_id, {CARD: card.encode(), **contents.files})


def push(run_dir: Path, repo_id: str, *, private: bool, say: Say) -> str:
    """Upload a run to a repository, made if it is not there, and return what was done in one line.

    Files that are missing there or differ are sent, those of an earlier push that this run has not are removed,
    in one commit; all are listed before. An error is a `DitLoraError` with the command that goes on; what was sent
    by then is not sent again. `private` makes a new repository private; a public one is then refused.
    """
    publication = prepare(run_dir, repo_id)
    for line in listing(publication):
        say(line)
    try:
        check_account(repo_id, private=private)
        return _upload(publication, private=private, say=say)
    except HubError as error:
        again = f"dit-lora push {run_dir} {repo_id}{'' if private else ' --public'}"
        raise DitLoraError(f"{error}. Nothing is lost; go on with: {again}") from error


def _upload(publication: Publication, *, private: bool, say: Say) -> str:
    api, repo_id = HfApi(), publication.repo_id
    asked(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True), say)
    url = f"{api.endpoint}/{repo_id}"
    return asked(lambda: _commit(api, publication, url, say), say)


def _commit(api: HfApi, publication: Publication, url: str, say: Say) -> str:
    """Add all files to the newest commit, unless another commit comes in between; unchanged ones are dropped there."""
    repo_id, files = publication.repo_id, publication.files
    head = api.model_info(repo_id)
    there = [one.rfilename for one in head.siblings or ()]
    removes = [
        CommitOperationDelete(name) for name in there if _is_ours(name) and name not in files
    ]
    adds = [CommitOperationAdd(name, content) for name, content in files.items()]
    seen, size = "private" if head.private else "public", sum(publication.sizes().values())
    say(f"hub: {len(files)} files to {url}, which is {seen} ({_size(size)})")
    made = publication.contents.made
    steps = sum(one.run.done for one in publication.contents.experts or (publication.contents,))
    commit = api.create_commit(
        repo_id,
        [*adds, *removes],
        commit_message=f"{made['family']}, {steps:,} steps, by dit-lora {made['version']}",
        parent_commit=head.sha,
    )
    if commit.oid == head.sha:
        return f"nothing to do: {url} has all {len(files)} files as they are here"
    return f"pushed {len(files)} files to {url}"


def _is_ours(name: str) -> bool:
    experts = EXPERTS.values()
    pairs = [file for one in experts for file in (pair_file(one), f"{one}/{VERIFICATION}")]
    return name in (*OURS, VERIFICATION, *pairs) or name.startswith(SAMPLES)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def listing(publication: Publication) -> list[str]:
    """Return the files of a push with their sizes, a line each."""
    return [f"{_size(size):>10}  {name}" for name, size in sorted(publication.sizes().items())]
