"""Runs the call of a bundle again within the script that made it, as far as it takes to make its model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dit_lora.commands.replayed import Replayed, judged, other_versions
from dit_lora.errors import DitLoraError, listed
from dit_lora.guard.attach.bundles import parameters_in_words, unpacked_call, versions
from dit_lora.guard.attach.calls.outermost_calls import OutermostCall, leave, listen
from dit_lora.guard.attach.guard import Guard
from dit_lora.guard.attach.interception import Interceptions
from dit_lora.guard.attach.run_script import run_as_main
from dit_lora.guard.bundle import Bundle
from dit_lora.numerics.dtensors import fill, needs_all_ranks, stock_class
from dit_lora.terminal import echo


class _Enough(BaseException):
    """Leaves the script, whatever errors it catches of its own."""


def replay_in_script(
    bundle: Bundle,
    folder: Path,
    script: str | None,
    arguments: Sequence[str],
    *,
    fp32: bool,
    without: Sequence[str],
) -> Replayed:
    """Run the script until it calls the bundle's model, load the trained weights, and make the bundle's call again.

    Raises `DitLoraError` without a script, and where no model that it trains fits the bundle.
    """
    if script is None:
        raise DitLoraError(
            f"{folder} is of a loop that is not dit-lora's: --script SCRIPT.py [-- ARGS] makes its model, up to the "
            "first call of it"
        )
    again = _Again(bundle, fp32=fp32, without=without)
    with again.waiting():
        run_as_main(script, arguments)
    if again.problem is not None:
        raise again.problem
    if again.result is None:
        raise again.nothing_fits(script)
    return again.result


class _Again:
    """Waits for the model of a bundle to be called, and makes the bundle's call in its place."""

    def __init__(self, bundle: Bundle, *, fp32: bool, without: Sequence[str]) -> None:
        self.result: Replayed | None = None
        self.problem: DitLoraError | None = None
        """Why the call could not be made."""
        self._bundle = bundle
        self._how: Mapping[str, Any] = {"fp32": fp32, "without": without}
        self._wanted: list[str] = bundle.facts["model"]["parameters"]
        self._class: str = bundle.facts["model"]["class"]
        self._others: dict[int, tuple[str, list[str]]] = {}
        """Models that were called and do not fit, by id: the class, and what differs."""
        self._stepped: set[int] = set()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Look at every outermost call within; leaves once the verdict is there, or it is clear that none comes."""
        found = Interceptions()
        # A guard of the script's own is not to write into the folder that the bundle may lie in.
        found.class_method(Guard, "__init__", self._without_folder)
        listen(self._around)
        hook = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        except _Enough:
            pass
        except SystemExit as end:
            if end.code:  # the script has said why
                raise
        finally:
            hook.remove()
            leave(self._around)
            found.undo()

    def nothing_fits(self, script: str) -> DitLoraError:
        """Return the error that says what differs in the model that is nearest to the bundle's, whole."""
        if not self._others:
            return DitLoraError(
                f"{script} called no model to train it; the bundle has a call of a {self._class}"
            )
        # One of its class before one that has a parameter less to differ in.
        name, differing = min(
            self._others.values(), key=lambda other: (other[0] != self._class, len(other[1]))
        )
        called = ", ".join(dict.fromkeys(one for one, _ in self._others.values()))
        return DitLoraError(
            listed(
                f"no model that {script} calls fits the bundle's {self._class} (called: {called}); give the arguments "
                f"that the script had then, behind --. What differs in {name}",
                differing,
            )
        )

    @contextmanager
    def _around(self, call: OutermostCall) -> Iterator[None]:
        model = self._fitting(call.module)
        if model is not None:
            try:
                self.result = self._replayed(model)
            except DitLoraError as problem:  # a script may catch errors of its own, and train on
                self.problem = problem
            raise _Enough
        yield

    def _fitting(self, outermost: nn.Module) -> nn.Module | None:
        """Return the module that the bundle's call was of: the one that is called or, in a wrapper, a part of it."""
        for module in outermost.modules():
            is_of_class = stock_class(module).__name__ == self._class
            if module is not outermost and not is_of_class:
                continue
            found = parameters_in_words(module)
            if found == self._wanted and is_of_class:
                return module
            if found:
                kind = stock_class(module).__name__
                differing = _differing(self._wanted, found) or ["the class, or the order"]
                self._others.setdefault(id(module), (kind, differing))
        return None

    def _without_folder(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, "folder": None})

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Leave at an optimizer's second step: by then every model of a step was called."""
        if id(optimizer) in self._stepped:
            raise _Enough
        self._stepped.add(id(optimizer))

    def _replayed(self, model: nn.Module) -> Replayed:
        bundle, facts = self._bundle, self._bundle.facts["replay"]
        echo(f"replay: {self._class} is called, and has the bundle's weights now", err=True)
        held = dict(model.named_parameters())
        for name, weight in bundle.weights.items():
            fill(held[name], weight)
        device = next((p.device for p in held.values()), torch.device("cpu"))
        call = unpacked_call(bundle, model, device)
        # Ranks that share weights run it together; what the first one finds is told.
        rank = 0 if needs_all_ranks(model) else facts["rank"]
        place = {"step": facts["step"], "micro_step": facts["micro_step"], "rank": rank}
        return judged(
            bundle,
            call.micro_batch(model, **place),
            model,
            **self._how,
            limit=None,
            masked_attention=None,
            notes=other_versions(bundle, versions()),
        )


def _differing(wanted: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return each parameter that one of two models lacks, or that has another shape in it."""
    then, now = (dict(words.rsplit(" ", 1) for words in one) for one in (wanted, found))
    shapes = {name: (then.get(name), now.get(name)) for name in [*then, *now]}
    return [
        f"{name}: {there or 'not'} in the bundle, {here or 'not'} here"
        for name, (there, here) in shapes.items()
        if there != here
    ]
