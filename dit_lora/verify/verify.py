"""Implements `dit-lora verify`: loads a saved result with its own library and runs five checks on it.

`check_tensor_names`, `check_finite`, `check_adapter_effect`, `check_scale`, `check_output`; docs/verify.md says what
each compares. A run verifies its result when it ends, with the frozen weights that it already has in memory, after a
check that they are unchanged.
"""

import logging
import textwrap
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

from dit_lora.adapters.attach import get_adapter_state
from dit_lora.adapters.diffusers_format import BASE_FILE
from dit_lora.adapters.kinds import get_adapter_kind
from dit_lora.adapters.patterns import read_peft_config, require_bounded_regex_patterns
from dit_lora.adapters.update_norms import (
    LoadedLayer,
    ModuleUpdate,
    compute_module_updates,
    compute_weight_norms,
    list_loaded_layers,
    measure_adapter_updates,
    measure_base_weight_changes,
)
from dit_lora.environment.safetensors_files import UnreadableFileError, read_header, read_metadata, read_tensors
from dit_lora.errors import CheckFailedError, DitLoraError, format_list
from dit_lora.numerics.adapter_tensors import is_adapter_tensor
from dit_lora.numerics.finite import describe_nonfinite_tensors
from dit_lora.parsing import parse_json
from dit_lora.verify.checks import (
    VerificationCheck,
    check_adapter_effect,
    check_finite,
    check_scale,
    check_tensor_names,
)
from dit_lora.verify.output_fingerprint import FAILURE, NOT_RECORDED, compare_output
from dit_lora.verify.reference_model import ReferenceModel

_NOT_LOADED = "not known: the file is not loaded as it is"
_MESSAGE_COLUMN = 15
"""Column where the messages of the checks begin in the text for a terminal."""
# What Diffusers, Transformers, PEFT and PyTorch raise for a file that does not fit the model.
_LOAD_ERRORS = (ValueError, RuntimeError, KeyError, TypeError, AttributeError, OSError, SafetensorError, DitLoraError)


@dataclass(frozen=True)
class Verification:
    """The outcome of verifying one result: its checks, each module's update, and notes."""

    adapter: str
    base_model: str
    checks: Mapping[str, VerificationCheck]
    modules: Sequence[ModuleUpdate] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the result's files when they were checked, by path in the run's folder; empty outside a run."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check of the verification passed."""
        return all(check.passed for check in self.checks.values())

    @property
    def failures(self) -> list[str]:
        """One line for each failed check of the verification."""
        return [f"{name}: {self.checks[name].message}" for name in self._list_failed()]

    def to_dict(self) -> dict[str, Any]:
        """The verification as JSON-compatible values."""
        return {
            "adapter": self.adapter,
            "base_model": self.base_model,
            "passed": self.passed,
            "checks": {name: check.to_dict() for name, check in self.checks.items()},
            "modules": [module.to_json_record() for module in self.modules],
            **({"files": dict(self.files)} if self.files else {}),
        }

    def format_lines(self) -> list[str]:
        """The verification as text for a terminal: a line for each check, notes, and the conclusion."""
        lines = [f"{self.adapter} on {self.base_model}"]
        wrapper = textwrap.TextWrapper(80 - _MESSAGE_COLUMN, break_long_words=False, break_on_hyphens=False)
        for name, check in self.checks.items():
            message: list[str] = []
            for line in check.message.split("\n"):
                # Items of lists stay whole: users copy names of tensors and values from them.
                message += [line] if line.startswith(" ") else wrapper.wrap(line)
            # Continuation lines are indented to the message's column.
            text = f"\n{' ' * _MESSAGE_COLUMN}".join(message)
            lines.append(f"  {'ok  ' if check.passed else 'FAIL'} {name:7} {text}")
        failed = f"failed: {', '.join(self._list_failed())}"
        lines += [f"  note {note}" for note in self.notes]
        return [*lines, "every check passed" if self.passed else failed]

    def format_summary(self) -> str:
        """The verification in one line, for a run's summary."""
        if not self.passed:
            return f"verified: failed: {', '.join(self._list_failed())}"
        update = self.checks["effect"].message.partition("\n")[0]
        output = self.checks["output"].message.partition(":")[0]
        return f"verified: {update}; output {output}"

    def _list_failed(self) -> list[str]:
        return [name for name, check in self.checks.items() if not check.passed]


@dataclass(frozen=True)
class VerificationTarget:
    """A result to verify, with what is known about it."""

    file: Path
    """The adapter's file (or its base weights'), or a pipeline's folder."""
    metadata: Mapping[str, Any]
    base_name: str
    reference_model: ReferenceModel
    dtype: torch.dtype
    """The dtype that the fresh model computes in."""
    skip_output_reason: str | None = None
    """Why the output is not compared here, and when it will be; None to compare it."""
    allow_extreme: bool = False
    """True to accept an update that is far larger than its weight."""
    shares_weights: bool = False
    """True if the fresh model shares its weights with the run."""

    @property
    def base_file(self) -> Path:
        """File of the trained base weights, which may not exist."""
        return self.file.with_name(BASE_FILE)

    @property
    def name(self) -> str:
        """Name of the result for messages, without its parent folders."""
        return self.file.name if self.file.is_dir() else f"{self.file.parent.name}/{self.file.name}"

    def read_config(self) -> dict[str, Any] | None:
        """PEFT's config stored with the adapter; None if there is none."""
        # In PEFT's format the config is a file next to the weights, in Diffusers' it is in the header.
        config_file = self.file.with_name(peft.utils.CONFIG_NAME)
        if config_file.is_file():
            return read_peft_config(config_file)
        text = read_metadata(self.file).get("lora_adapter_metadata")
        metadata = parse_json(text) if text else {}
        adapter_config = {name.removeprefix("transformer."): value for name, value in metadata.items()}
        require_bounded_regex_patterns(adapter_config, self.file)
        return adapter_config or None

    def check_output(self, model: nn.Module, dtype: torch.dtype) -> VerificationCheck:
        """Compare the output of the model that has the result loaded with the recorded output."""
        # The run wrote this into the header when it saved the adapter.
        output_record = self.metadata.get("output")
        if output_record is None:
            return VerificationCheck(True, "not recorded in training: the file has no output to compare")
        # A recorded failure is reported even if the comparison has to wait.
        if self.skip_output_reason and not {NOT_RECORDED, FAILURE} & output_record.keys():
            return VerificationCheck(True, f"not compared: {self.skip_output_reason}")
        base_model = self.metadata.get("base_model") or "the checkpoint that it was trained on"
        try:
            shared, digest = self.shares_weights, self.metadata.get("transformer_digest")
            return compare_output(
                self.reference_model, model, output_record, dtype, base_model, shares_weights=shared, digest=digest
            )
        # The run may fill the GPU. That says nothing about the result, so the check passes with a note.
        except torch.OutOfMemoryError:
            device = next(model.parameters()).device
            return VerificationCheck(True, f"not compared: a forward pass does not fit the memory of {device}")


def check_pipeline(
    result: VerificationTarget, checks: Mapping[str, VerificationCheck], load_model: Callable[[], nn.Module]
) -> Verification:
    """Verify a full pipeline: the output is compared if the other checks passed."""
    # A forward pass with damaged weights would fail or mislead.
    output = VerificationCheck(False, "not compared: the files do not hold what they should")
    if all(check.passed for check in checks.values()):
        fresh = load_model()
        output = result.check_output(fresh, next(fresh.parameters()).dtype)
    return Verification(result.name, result.base_name, {**checks, "output": output})


def check_adapter(result: VerificationTarget, new_model: nn.Module) -> Verification:
    """Run the checks of an adapter, and of trained base weights, in a fresh model of its base."""
    read_header(result.file)  # raises a one-line error for a file that cannot be read
    # The base weights that were trained too; empty without such a file.
    config, base = result.read_config(), read_tensors(result.base_file, missing_ok=True)
    try:
        file_tensors = result.reference_model.read_adapter_tensors(result.file)
    except DitLoraError as error:
        # The library does not accept the format. Without its names only the values can be checked.
        tensors = read_tensors(result.file)
        checks = {
            "keys": VerificationCheck(False, str(error)),
            "finite": check_finite(describe_nonfinite_tensors([*tensors.items()]), len(tensors)),
            **dict.fromkeys(("effect", "scale", "output"), VerificationCheck(False, _NOT_LOADED)),
        }
        return Verification(result.name, result.base_name, checks)
    # Before the adapter is loaded, which renames the layers that it wraps.
    expected = _find_expected_layers(config, new_model)
    layers: Mapping[str, LoadedLayer] = {}
    updates: list[ModuleUpdate] = []
    effects = output = VerificationCheck(False, _NOT_LOADED)
    # Loads the adapter into the fresh model, which has PEFT's layers from here on.
    key_check = _try_loading(result, new_model)
    if key_check is None:
        # The first adapter is the only one, because the model is fresh; base weights alone attach none.
        adapters = getattr(new_model, "peft_config", None)
        loaded_tensors = get_adapter_state(new_model, next(iter(adapters))) if adapters else {}
        key_check = check_tensor_names(result.reference_model.name, file_tensors, loaded_tensors, expected, [*base])
        layers = list_loaded_layers(new_model)
    # Without loaded layers there is no scale, and so no update to measure.
    if layers or not file_tensors:
        updates, effects = _measure_adapter_effect(result, new_model, file_tensors, base, layers)
    # With missing or foreign tensors the output differs in any case.
    if key_check.passed:
        output = result.check_output(new_model, result.dtype)
    bad_tensors = describe_nonfinite_tensors([*file_tensors.items(), *base.items()])
    checks = {
        "keys": key_check,
        "finite": check_finite(bad_tensors, len(file_tensors) + len(base)),
        "effect": effects,
        "scale": check_scale(config, layers, _read_ranks(file_tensors), result.metadata),
        "output": output,
    }
    return Verification(result.name, result.base_name, checks, updates)


def _measure_adapter_effect(
    result: VerificationTarget,
    new_model: nn.Module,
    file_tensors: Mapping[str, torch.Tensor],
    base_weights: Mapping[str, torch.Tensor],
    layers: Mapping[str, LoadedLayer],
) -> tuple[list[ModuleUpdate], VerificationCheck]:
    files = result.reference_model.list_weight_files()
    # Weights on the meta device are read from the checkpoint's files.
    norms, changes = compute_weight_norms(new_model, files), measure_base_weight_changes(base_weights, files)
    is_dora = any("magnitude" in name for name in file_tensors)
    is_lora = get_adapter_kind(result.read_config()) == "lora" and not is_dora
    # A LoRA's update only depends on the file. Other kinds need a loaded layer with its weight.
    if not is_lora and any(p.is_meta for n, p in new_model.named_parameters() if is_adapter_tensor(n)):
        return [], VerificationCheck(True, f"not measured: {result.skip_output_reason}")
    updates = (
        compute_module_updates(file_tensors, layers, norms) if is_lora else measure_adapter_updates(new_model, norms)
    )
    return updates, check_adapter_effect(updates, [*base_weights], changes, allow_extreme=result.allow_extreme)


def _try_loading(result: VerificationTarget, new_model: nn.Module) -> VerificationCheck | None:
    """Load the result as users do. Returns a failed check `check_tensor_names` if its library rejects it, else None.

    The library's warnings are hidden, because the checks report the same.
    """
    try:
        with _suppress_library_warnings():
            result.reference_model.load_adapter(new_model, result.file)
    except _LOAD_ERRORS as error:
        trained_on = result.metadata.get("base_model")
        hint = f" (it was trained on {trained_on})" if trained_on else ""
        # The library's own lines become the list of the message.
        first_line, *other_lines = (str(error).strip() or type(error).__name__).splitlines()
        message = f"{result.reference_model.name} refuses the file on this base{hint}: {first_line.strip()}"
        return VerificationCheck(
            False, format_list(message, [line.strip().removeprefix("- ") for line in other_lines])
        )
    return None


@contextmanager
def raise_check_failed_if_unreadable() -> Iterator[None]:
    """Turn an `UnreadableFileError` in the context into a `CheckFailedError`: such a file does not pass."""
    try:
        yield
    except UnreadableFileError as error:
        raise CheckFailedError(str(error)) from error


@contextmanager
def _suppress_library_warnings() -> Iterator[None]:
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


def _find_expected_layers(config: Mapping[str, Any] | None, new_model: nn.Module) -> list[str]:
    """Names of the layers that the config's target modules match, by PEFT's rule."""
    if not config or not config.get("target_modules"):
        return []
    target_config = peft.LoraConfig(target_modules=config["target_modules"])
    return [
        name
        for name, module in new_model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and check_target_module_exists(target_config, name)
    ]


def _read_ranks(file_tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Ranks of LoRA A and LoRA B in an adapter file, by module."""
    ranks = {}
    for name, a in file_tensors.items():
        # A is (rank, inputs) and B is (outputs, rank).
        module, is_a, _ = name.partition(".lora_A.")
        b = file_tensors.get(f"{module}.lora_B.weight")
        if is_a and b is not None:
            ranks[module] = (a.shape[0], b.shape[1])
    return ranks
