"""Loops that give the model nothing of a batch itself, but latents and noise made of it, as Diffusers' scripts do."""

from pathlib import Path

import pytest
import torch
from loop_helpers import Events, fresh_accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dit_lora.config.recovery_settings import RecoveryConfig
from dit_lora.guard.attach.run_script import ScriptGuard


class Pictures(Dataset[torch.Tensor]):
    """Six pictures, one of them with NaN."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        x[1] = torch.nan if index == self.bad else x[1]
        return x


def guarded_loop(folder: Path, bad: int, *, cached: bool) -> Events:
    """Train three epochs under the command's overseer; `cached` encodes all before the first step."""
    overseer = ScriptGuard(RecoveryConfig(max_skips=50), folder, lambda message: None)
    with overseer.watch_script():
        accelerator = fresh_accelerator()
        torch.manual_seed(bad)
        model = nn.Linear(4, 4)
        loader = DataLoader(Pictures(bad), batch_size=2, shuffle=True)
        cache = [batch * 0.5 for batch in loader] if cached else []
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), loader)
        for _ in range(3):
            for step, batch in enumerate(loader):
                latents = cache[step] if cached else batch * 0.5
                optimizer.zero_grad()
                accelerator.backward((model(latents) - latents).square().mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return [event for guard in overseer.active_guards for event in guard.events]


@pytest.mark.parametrize("bad", range(6))
def test_the_sample_is_named_though_accelerate_fetches_a_batch_ahead(bad: int, tmp_path: Path) -> None:
    events = guarded_loop(tmp_path, bad, cached=False)
    assert [event["sample_ids"] for event in events] == [[f"dataset index {bad}"]] * 3


def test_no_sample_is_named_by_another_passs_order(tmp_path: Path) -> None:
    """A cache of latents keeps the order in which it was made: later batches are others."""
    events = guarded_loop(tmp_path, 3, cached=True)
    assert len(events) == 3
    for event in events:
        (name,) = event["sample_ids"]
        assert name in ("row 0 of micro-batch 0", "row 1 of micro-batch 0")
        assert event["verdict"]["cause"] == "inputs"
