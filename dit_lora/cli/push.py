"""The verb `dit-lora push`: a run's result on the Hugging Face Hub."""

from typing import Annotated

import typer

from dit_lora.cli.arguments import RunFolder
from dit_lora.errors import DitLoraError
from dit_lora.terminal import echo

EXAMPLES = {"push": ("push runs/kitten me/kitten-lora --dry-run", "push runs/kitten me/kitten-lora --private")}


def push(
    run: RunFolder,
    repo_id: Annotated[
        str, typer.Argument(help="Repository on the Hub, as OWNER/NAME. It is created if it does not exist.")
    ],
    public: Annotated[
        bool,
        typer.Option(
            "--public/--private",
            help="Allow everybody to see it. With --private, an existing public repository is refused.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only write the model card and list the files.")] = False,
) -> None:
    """Push a run's adapter, model card and samples to the Hub, in one commit.

    Files that the repository has already are not sent again.
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
        echo(f"Nothing was sent. The model card is {run / 'README.md'}.")
        return
    echo(run_push(run, repo_id, private=not public, say=lambda line: echo(line, err=True)))
