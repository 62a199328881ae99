"""Whether an update is more than rounding."""

import pytest
import torch

from dit_lora.adapters.update_norms import ModuleUpdate
from dit_lora.verify.checks import check_adapter_effect, check_tensor_names


@pytest.mark.parametrize(
    ("shares", "passed", "words"),
    [
        (
            (9e-23, 2e-24),
            False,
            "the updates of all 2 modules are lost in rounding (at most 9e-21%",
        ),
        ((0.0, 0.0), False, "the updates of all 2 modules are zero"),
        ((9e-23, 0.01), True, "dead, their update is zero or lost in rounding:\n  - to_0"),
        ((1e-7, 0.01), True, "2 modules, update 1e-05 to 1% of their weights"),
    ],
)
def test_an_update_that_rounding_takes_away_is_no_effect(shares: tuple[float, ...], passed: bool, words: str) -> None:
    updates = [ModuleUpdate(f"to_{n}", 3 * x, x, x) for n, x in enumerate(shares)]
    check = check_adapter_effect(updates, ())
    assert check.passed is passed
    assert words in check.message


IDLE = "attn2.add_k_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("added", "header", "passes"),
    [
        (torch.zeros(2, 3), ["attn2.to_k"], True),
        (torch.zeros(2, 3), [], True),
        (torch.eye(3), ["attn2.to_k"], False),
        (torch.zeros(2, 3), ["attn2.to_k", "attn2.add_k_proj"], False),
        (torch.zeros(2, 3, device="meta"), ["attn2.to_k"], True),
        (torch.zeros(2, 3, device="meta"), [], False),
    ],
)
def test_zeros_that_a_loader_adds_are_none_of_the_files(added: torch.Tensor, header: list[str], passes: bool) -> None:
    """Wan's does for image keys of an adapter without them; layers that the header asks for have to be in the file."""
    tensors = {"attn2.to_k.lora_B.weight": torch.ones(2, 3)}
    check = check_tensor_names("WanImageToVideoPipeline", tensors, {**tensors, IDLE: added}, header, [])
    assert check.passed == passes
    assert (f"{IDLE}: not in the file" in check.message) != passes
