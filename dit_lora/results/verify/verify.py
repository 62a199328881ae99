"""Implements `dit-lora verify`: loads a saved result with its own library and runs five checks on it.

`keys`, `finite`, `effect`, `scale`, `output`; docs/verify.md says what each compares. A run verifies its result when
it ends, with the frozen weights that it already has in memory, after a check that they are unchanged.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError
from torch import nn

from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.adapters.kinds import kind_of
from dit_lora.adapters.patterns import read_peft_config, require_bounded_patterns
from dit_lora.adapters.update_norms import (
    LoadedLayer,
    ModuleUpdate,
    base_updates,
    loaded_layers,
    measured_updates,
    module_updates,
    weight_norms,
)
from dit_lora.errors import DitLoraError, listed
from dit_lora.numerics.adapter_tensors import is_adapter
from dit_lora.numerics.finite import not_finite
from dit_lora.parsing import parse_json
from dit_lora.results.tensor_file import header_of, tensors_of
from dit_lora.results.verify.checks import Check, effect, finite, keys, scale
from dit_lora.results.verify.output import NOT_RECORDED, WRONG, compare_output
from dit_lora.results.verify.reference_model import ReferenceModel

_NOT_LOADED = "not known: the file is not loaded as it is"
# What Diffusers, Transformers, PEFT and PyTorch raise for a file that does not fit the model.
_REFUSALS = (
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    OSError,
    SafetensorError,
    DitLoraError,
)


@dataclass(frozen=True)
class Verification:
    """The checks of one result."""

    adapter: str
    base_model: str
    checks: Mapping[str, Check]
    modules: Sequence[ModuleUpdate] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the result's files when they were checked, by path in the run's folder; empty outside a run."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks.values())

    @property
    def wrong(self) -> list[str]:
        """One line for each failed check."""
        return [f"{name}: {self.checks[name].words}" for name in self._failed()]

    def record(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return {
            "adapter": self.adapter,
            "base_model": self.base_model,
            "passed": self.passed,
            "checks": {name: check.record() for name, check in self.checks.items()},
            "modules": [module.record() for module in self.modules],
            **({"files": dict(self.files)} if self.files else {}),
        }

    def lines(self) -> list[str]:
        """Text for a terminal: a line for each check, notes, and the conclusion."""
        lines = [f"{self.adapter} on {self.base_model}"]
        # Continuation lines are indented to the message's column.
        for name, check in self.checks.items():
            message = check.words.replace("\n", "\n" + " " * 15)
            lines.append(f"  {'ok  ' if check.passed else 'FAIL'} {name:7} {message}")
        failed = f"failed: {', '.join(self._failed())}"
        lines += [f"  note {note}" for note in self.notes]
        return [*lines, "every check passed" if self.passed else failed]

    def line(self) -> str:
        """One line for a run's summary."""
        if not self.passed:
            return f"verified: failed: {', '.join(self._failed())}"
        update = self.checks["effect"].words.partition("\n")[0]
        output = self.checks["output"].words.partition(":")[0]
        return f"verified: {update}; output {output}"

    def _failed(self) -> list[str]:
        """Names of the failed checks."""
        return [name for name, check in self.checks.items() if not check.passed]


@dataclass(frozen=True)
class Result:
    """A result to verify, with what is known about it."""

    file: Path
    """The adapter's file (or its base weights'), or a pipeline's folder."""
    made: Mapping[str, Any]
    base_name: str
    stock: ReferenceModel
    dtype: torch.dtype
    """The dtype that the fresh model computes in."""
    later: str | None = None
    """Why the output is not compared here, and when it will be; None to compare it."""
    allow_extreme: bool = False
    """True to accept an update that is far larger than its weight."""
    own: bool = False
    """True if the fresh model shares its weights with the run."""

    @property
    def base_file(self) -> Path:
        """File of the trained base weights, which may not exist."""
        return self.file.with_name(BASE_FILE)

    @property
    def name(self) -> str:
        """The result's name without its parent folders."""
        return self.file.name if self.file.is_dir() else f"{self.file.parent.name}/{self.file.name}"

    def config(self) -> dict[str, Any] | None:
        """PEFT's config stored with the adapter; None if there is none."""
        # In PEFT's format the config is a file next to the weights, in Diffusers' it is in the header.
        config_file = self.file.with_name(peft.utils.CONFIG_NAME)
        if config_file.is_file():
            return read_peft_config(config_file)
        text = header_of(self.file).get("lora_adapter_metadata")
        metadata = parse_json(text) if text else {}
        adapter_config = {
            name.removeprefix("transformer."): value for name, value in metadata.items()
        }
        require_bounded_patterns(adapter_config, self.file)
        return adapter_config or None

    def output(self, model: nn.Module, dtype: torch.dtype) -> Check:
        """The check `output`, for the model with the result loaded."""
        # The run wrote this into the header when it saved the adapter.
        output_record = self.made.get("output")
        if output_record is None:
            return Check(True, "not recorded at training's end: the file says nothing of it")
        # A recorded failure is reported even if the comparison has to wait.
        if self.later and not {NOT_RECORDED, WRONG} & output_record.keys():
            return Check(True, f"not compared: {self.later}")
        base_model = self.made.get("base_model") or "the checkpoint that it was trained on"
        try:
            digest = self.made.get("transformer_digest")
            return compare_output(
                self.stock, model, output_record, dtype, base_model, own=self.own, digest=digest
            )
        # The run may fill the GPU. That says nothing about the result, so the check passes with a note.
        except torch.OutOfMemoryError:
            device = next(model.parameters()).device
            return Check(True, f"not compared: a forward pass does not fit the memory of {device}")


def check_pipeline(
    result: Result, checks: Mapping[str, Check], load: Callable[[], nn.Module]
) -> Verification:
    """Add the check `output` to the others, if those passed."""
    # A forward pass with damaged weights would fail or mislead.
    output = Check(False, "not compared: the files do not hold what they should")
    if all(check.passed for check in checks.values()):
        fresh = load()
        output = result.output(fresh, next(fresh.parameters()).dtype)
    return Verification(result.name, result.base_name, {**checks, "output": output})


def check_adapter(result: Result, fresh: nn.Module) -> Verification:
    """Run the checks of an adapter, and of trained base weights, in a fresh model of its base."""
    header_of(result.file)  # raises a one-line error for a file that cannot be read
    # The base weights that were trained too; empty without such a file.
    config, base = result.config(), tensors_of(result.base_file)
    try:
        file_tensors = result.stock.stored(result.file)
    except DitLoraError as error:
        return _unread(result, error)
    # Before the adapter is loaded, which renames the layers that it wraps.
    expected = _expected(config, fresh)
    layers: Mapping[str, LoadedLayer] = {}
    updates: list[ModuleUpdate] = []
    effects = output = Check(False, _NOT_LOADED)
    # Loads the adapter into the fresh model, which has PEFT's layers from here on.
    key_check = _refusal(result, fresh)
    if key_check is None:
        key_check = keys(result.stock.name, file_tensors, _loaded(fresh), expected, [*base])
        layers = loaded_layers(fresh)
    # Without loaded layers there is no scale, and so no update to measure.
    if layers or not file_tensors:
        updates, effects = _effect(result, fresh, file_tensors, base, layers)
    # With missing or foreign tensors the output differs in any case.
    if key_check.passed:
        output = result.output(fresh, result.dtype)
    checks = {
        "keys": key_check,
        "finite": finite(
            not_finite([*file_tensors.items(), *base.items()]), len(file_tensors) + len(base)
        ),
        "effect": effects,
        "scale": scale(config, layers, _ranks(file_tensors), result.made),
        "output": output,
    }
    return Verification(result.name, result.base_name, checks, updates)


def _effect(
    result: Result,
    fresh: nn.Module,
    stored: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    layers: Mapping[str, LoadedLayer],
) -> tuple[list[ModuleUpdate], Check]:
    """The size of each layer's update, and the check of all of them."""
    files = result.stock.weight_files()
    # Weights on the meta device are read from the checkpoint's files.
    norms, changes = weight_norms(fresh, files), base_updates(base, files)
    is_lora = kind_of(result.config()) == "lora" and not any("magnitude" in name for name in stored)
    # A LoRA's update only depends on the file. Other kinds need a loaded layer with its weight.
    if not is_lora and any(p.is_meta for n, p in fresh.named_parameters() if is_adapter(n)):
        return [], Check(True, f"not measured: {result.later}")
    updates = module_updates(stored, layers, norms) if is_lora else measured_updates(fresh, norms)
    return updates, effect(updates, [*base], changes, allow_extreme=result.allow_extreme)


def _unread(result: Result, error: DitLoraError) -> Verification:
    """The checks of a file whose format the library does not accept."""
    # Without the library's names only the values can be checked.
    tensors = tensors_of(result.file)
    checks = {
        "keys": Check(False, str(error)),
        "finite": finite(not_finite([*tensors.items()]), len(tensors)),
        **dict.fromkeys(("effect", "scale", "output"), Check(False, _NOT_LOADED)),
    }
    return Verification(result.name, result.base_name, checks)


def _refusal(result: Result, fresh: nn.Module) -> Check | None:
    """Load the result as users do. Returns a failed check `keys` if its library rejects it, else None.

    The library's warnings are hidden, because the checks report the same.
    """
    try:
        with _unheard():
            result.stock.put(fresh, result.file)
    except _REFUSALS as error:
        trained_on = result.made.get("base_model")
        hint = f" (it was trained on {trained_on})" if trained_on else ""
        # The library's own lines become the list of the message.
        first_line, *other_lines = (str(error).strip() or type(error).__name__).splitlines()
        message = f"{result.stock.name} refuses the file on this base{hint}: {first_line.strip()}"
        return Check(
            False, listed(message, [line.strip().removeprefix("- ") for line in other_lines])
        )
    return None


@contextmanager
def _unheard() -> Iterator[None]:
    """Context in which the libraries' warnings are hidden."""
    # The libraries warn about each missing key; the checks list them.
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "peft")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _loaded(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors of the loaded adapter, with the names used in files; empty without an adapter."""
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return {}
    # The first adapter is the only one: the model is fresh.
    state = peft.get_peft_model_state_dict(
        model, adapter_name=next(iter(adapters)), save_embedding_layers=False
    )
    return {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}


def _expected(config: Mapping[str, Any] | None, fresh: nn.Module) -> list[str]:
    """Layers that the config's target modules match, by PEFT's rule."""
    if not config or not config.get("target_modules"):
        return []
    target_config = peft.LoraConfig(target_modules=config["target_modules"])
    return [
        name
        for name, module in fresh.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
        and check_target_module_exists(target_config, name)
    ]


def _ranks(stored: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Ranks of A and of B in the file, by module."""
    ranks = {}
    for name, a in stored.items():
        # A is (rank, inputs) and B is (outputs, rank).
        module, is_a, _ = name.partition(".lora_A.")
        b = stored.get(f"{module}.lora_B.weight")
        if is_a and b is not None:
            ranks[module] = (a.shape[0], b.shape[1])
    return ranks
