"""The bundle of a wrong gradient of another loop: replayed in its script, it has the same ratio and bound."""

import json
from pathlib import Path
from typing import Any

import pytest

from dit_lora.commands.replay import replay_bundle
from dit_lora.commands.replayed_gradient import GradientReplayResult
from dit_lora.errors import DitLoraError
from dit_lora.guard import LoopConfig
from dit_lora.guard.attach.run_script import run_script

SCRIPT = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--factor", type=float, default=1.1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--two", action="store_true")
args = parser.parse_args()
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 64), nn.Dropout(0.2), nn.Linear(64, 32)

    def forward(self, x, *, scale):
        hidden = self.last(self.drop(torch.tanh(self.first(x)))) * scale
        return hidden.detach() + args.factor * (hidden - hidden.detach())

net = Net()
other = nn.Linear(32, 32) if args.two else nn.Identity()
optimizer = torch.optim.AdamW([*net.parameters(), *other.parameters()], lr=1e-3)
for step in range(2):
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            output = other(net(torch.randn(4, 6), scale=0.5))
        (output.float() - torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def train(tmp_path: Path, *arguments: str) -> tuple[Path, dict[str, Any]]:
    """Run the script under the guard. Returns its path and the event of its first step."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run_script(str(script), arguments, config=LoopConfig(gradient_every=9), folder=tmp_path / "guarded")
    (event,) = map(json.loads, (tmp_path / "guarded" / "events.jsonl").read_text().splitlines())
    assert (event["step"], event["kind"]) == (1, "gradient_check")
    return script, event


@pytest.mark.parametrize("arguments", [["--factor", "1.1"], ["--bf16", "--factor", "2"]])
def test_a_replay_in_the_script_has_the_same_ratio_and_bound(tmp_path: Path, arguments: list[str]) -> None:
    script, event = train(tmp_path, *arguments)
    folder = tmp_path / "guarded" / event["bundle"]
    replayed = replay_bundle(folder, script=str(script), arguments=arguments)
    assert isinstance(replayed, GradientReplayResult)
    evidence = event["verdict"]["evidence"]
    for report in (replayed.recorded, replayed.computed):
        assert report.worst is not None
        assert (report.worst.ratio, report.worst.bound) == (evidence["ratio"], evidence["bound"])
        assert report.location is not None
        assert report.location.layer == event["verdict"]["module"] == "last"
    assert "recorded gradient: the gradient is wrong: along the gradient, the slope" in replayed.format_text()
    assert replayed.record()["losses"] == []
    # A script without the fault: the recorded gradient is as wrong, and the computed one is right.
    mended = replay_bundle(folder, script=str(script), arguments=[*arguments[:-1], "1"])
    assert isinstance(mended, GradientReplayResult)
    assert mended.recorded.result == "differs"
    # In bf16 the recorded gradient is compared with that of replays, which are right now.
    if "--bf16" in arguments:
        assert "differs from that of replays of the step by 1 of its length, in all layers" in mended.recorded.message
    else:
        assert mended.recorded == replayed.recorded
    assert mended.computed.result == "agrees"
    with pytest.raises(DitLoraError, match="--script"):
        replay_bundle(folder)


def test_a_loop_of_two_models_says_why_it_has_no_bundle(tmp_path: Path) -> None:
    _, event = train(tmp_path, "--two")
    assert "bundle" not in event
    reason = "no bundle is written: the loop trains several models, or calls parts of one"
    assert event["verdict"]["words"].endswith(reason)
