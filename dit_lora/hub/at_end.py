"""Push at the end of training: refused before it starts if it cannot be done, and never at the cost of the run."""

from dit_lora.errors import DitLoraError
from dit_lora.hub.account import HubError, UnreachableError, check_account
from dit_lora.hub.push import push
from dit_lora.training.runtime import Runtime, agree


def require_hub(runtime: Runtime) -> None:
    """Refuse a run whose result could not be pushed, before anything is encoded or trained. Collective.

    A Hub that does not answer now may answer then: that is a warning.
    """
    hub = runtime.recipe.hub
    if not hub.push or hub.repo_id is None:
        return
    error = None
    if runtime.is_main:
        try:
            check_account(hub.repo_id, private=hub.private)
        except UnreachableError as problem:
            runtime.say(f"warning: hub.push: {problem}; the token is not checked")
        except HubError as problem:
            error = DitLoraError(f"hub.push: {problem}; or train with hub.push=false")
    agree(runtime.accelerator, error)


def push_result(runtime: Runtime) -> None:
    """Push as `hub` says; the others wait for as long as it takes, and an error is raised on all. Collective.

    The run is whole by then and stays as it is.
    """
    hub = runtime.recipe.hub
    if not hub.push or hub.repo_id is None:
        return
    error = None
    if runtime.is_main:
        try:
            runtime.say(push(runtime.dir, hub.repo_id, private=hub.private, say=runtime.say))
        except DitLoraError as problem:
            error = DitLoraError(
                f"the run is whole in {runtime.dir}, but it was not pushed: {problem}"
            )
            error.exit_code = problem.exit_code
    agree(runtime.accelerator, error)
