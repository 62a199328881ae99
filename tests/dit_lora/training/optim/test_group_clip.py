"""One group's enormous gradient does not reduce the others' updates, if it has its own clip."""

import pytest
import torch
from torch import nn

from dit_lora.adapters.groups import parameter_groups
from dit_lora.config.optim import GroupConfig, GroupsConfig, OptimConfig
from dit_lora.training.optim.build import build_optimizer, clip_gradients, compute_gradient_norms


class ZeroQueries(nn.Module):
    """VideoChat2's 64 extra queries, which start at zero, and the LayerNorm of its Q-Former (eps 1e-12)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.extra_query_tokens = nn.Parameter(torch.zeros(64, 32))
        self.norm = nn.LayerNorm(32, eps=1e-12)
        self.projection = nn.Linear(32, 16)
        with torch.no_grad():
            self.norm.weight += 0.1 * torch.randn(32)
            self.norm.bias += 0.1 * torch.randn(32)

    def forward(self) -> torch.Tensor:
        return self.projection(self.norm(self.extra_query_tokens)).sin().mean()


def gradients(clip: float | None) -> tuple[dict[str, float], dict[str, float], float]:
    """Group norms before clipping and after, and the largest update of AdamW to the projection."""
    model = ZeroQueries().requires_grad_(False)
    groups = GroupsConfig(
        adapter=None,
        connector=GroupConfig(lr=1e-3, clip=clip, modules=("extra_query_tokens",)),
        backbone=GroupConfig(lr=1e-3, modules=("projection.*",)),
    )
    optim = OptimConfig(groups=groups, clip=1.0, weight_decay=0.0, eps=1e-4)
    members = parameter_groups(model, **groups.get_configured_groups())
    optimizer = build_optimizer(members, optim)
    model().backward()
    before = compute_gradient_norms(optimizer.param_groups)
    clip_gradients(optimizer.param_groups, before, optim)
    after = compute_gradient_norms(optimizer.param_groups)
    start = model.projection.weight.detach().clone()
    optimizer.step()
    moved = (model.projection.weight - start).abs().max().item()
    return (*({k: v.item() for k, v in norms.items()} for norms in (before, after)), moved)


def test_zero_queries_before_a_layer_norm_dominate_a_shared_clip() -> None:
    before, after, moved = gradients(clip=None)
    assert before["connector"] > 1e3  # 1 / sqrt(1e-12) times what comes back
    assert before["backbone"] < 1
    assert after["connector"] == pytest.approx(1, rel=1e-3)
    assert after["backbone"] < 1e-3 * before["backbone"]
    assert moved < 1e-3 * 0.05  # a twentieth of the learning rate: gradients below AdamW's eps


def test_a_clip_of_their_own_leaves_the_others_updates_alone() -> None:
    before, after, moved = gradients(clip=0.5)
    assert after["connector"] == pytest.approx(0.5, rel=1e-3)
    assert after["backbone"] == before["backbone"]
    assert moved == pytest.approx(1e-3, rel=0.05)
