"""The verb `dit-lora push`: a run's result on the Hugging Face Hub."""

from typing import Annotated

import typer

from dit_lora.cli.arguments import RunFolder
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {"push": ("push runs/kitten me/kitten-lora --dry-run", "push runs/kitten me/kitten-lora --private")}


def push(
    run: RunFolder,
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if it is not there.")],
    public: Annotated[
        bool,
        typer.Option(
            "--public/--private",
            help="Everybody may see it; without, a repository that is made is private, and a public one is refused.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Send nothing: list the files, and write the card.")
    ] = False,
) -> None:
    """Push a run to the Hub: adapter, model card and samples in one commit.

    Files that are there are not sent again.
    """
    from dit_lora.config.recipe import find_repo_id_problem
    from dit_lora.hub.push import list_files, prepare_publication
    from dit_lora.hub.push import push as run_push

    # Before the run's files are read and prepared.
    problem = find_repo_id_problem(repo_id)
    if problem:
        raise DitLoraError(f"REPO_ID {repo_id!r}: {problem}")
    if dry_run:
        for line in list_files(prepare_publication(run, repo_id)):
            echo(line)
        echo(f"nothing was sent; the card is in {run / 'README.md'}")
        return
    echo(run_push(run, repo_id, private=not public, say=lambda line: echo(line, err=True)))
