"""Pushes the result at the end of training.

Impossible pushes are rejected before training, and failures keep the run.
"""

from pathlib import Path

from dit_lora.config.recipe import HubConfig, Recipe
from dit_lora.errors import DitLoraError
from dit_lora.hub.account import HubError, UnreachableError, check_account
from dit_lora.hub.push import push
from dit_lora.training.session.session import Session, raise_on_all_ranks


def require_hub_access(session: Session, hub: HubConfig) -> None:
    """Reject a run whose result could not be pushed, before anything is encoded or trained. Collective.

    If the Hub does not answer now it may answer later, so that is only a warning.
    """
    if not hub.push or hub.repo_id is None:
        return
    # Only the main rank talks to the Hub. Its error is then raised on all ranks.
    error = None
    if session.is_main:
        try:
            check_account(hub.repo_id, private=hub.private)
        except UnreachableError as problem:
            session.say(f"warning: hub.push: {problem}; the token cannot be checked")
        except HubError as problem:
            error = DitLoraError(f"hub.push: {problem}; or train with hub.push=false")
    raise_on_all_ranks(session.accelerator, error)


def push_result(session: Session, recipe: Recipe) -> None:
    """Push the recipe's run.dir as `hub` configures. Other ranks wait, and an error is raised on all. Collective.

    The run is complete by then and is not changed.
    """
    hub, folder = recipe.hub, Path(recipe.run.dir)
    if not hub.push or hub.repo_id is None:
        return
    error = None
    if session.is_main:
        try:
            session.say(push(folder, hub.repo_id, private=hub.private, say=session.say))
        except DitLoraError as problem:
            error = DitLoraError(f"the run in {folder} is complete, but was not pushed: {problem}")
            # Keep the exit code, which tells a failed check from bad input.
            error.exit_code = problem.exit_code
    raise_on_all_ranks(session.accelerator, error)
