"""A script of Transformers' Trainer under the guard's command, with checkpoints on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launching import launch_environment

SCRIPT = """
import sys
import torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2))

class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        weight = model.model.layers[0].mlp.up_proj.weight
        if sys.argv[1] == "moment" and state.global_step == 3:
            optimizer.state[weight]["exp_avg"][0, 0] = float("nan")

def collated(rows):
    ids = torch.stack([row["ids"] for row in rows])
    embeds = model.get_input_embeddings()(ids).detach()
    for at, row in enumerate(rows):
        if sys.argv[1] == "inputs" and row["id"] == "clip_5":
            embeds[at, 2, 3] = float("nan")
    return {"inputs_embeds": embeds, "labels": ids}

data = [{"ids": torch.randint(0, 32, (6,)), "id": f"clip_{n}"} for n in range(8)]
arguments = TrainingArguments("out", max_steps=8, per_device_train_batch_size=2, save_steps=4, report_to=[],
    use_cpu=True, learning_rate=1e-2, disable_tqdm=True, remove_unused_columns=False)
Trainer(model, arguments, train_dataset=data, data_collator=collated, callbacks=[Fault()]).train()
paths = sorted(Path("out").glob("checkpoint-*/model.safetensors"))
finite = [all(bool(t.isfinite().all()) for t in load_file(path).values()) for path in paths]
print("finite", finite, "sum", sum(p.double().sum().item() for p in model.parameters()))
"""


def run(folder: Path, fault: str, *, guarded: bool) -> str:
    (folder / "train.py").write_text(SCRIPT)
    guard = ("-m", "dit_lora.guard", "--folder", "guarded") if guarded else ()
    process = subprocess.run(
        [sys.executable, *guard, "train.py", fault],
        cwd=folder,
        capture_output=True,
        text=True,
        env=launch_environment(),
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


@pytest.mark.parametrize(("fault", "cause"), [("inputs", "inputs"), ("moment", "optimizer")])
@pytest.mark.thorough
def test_checkpoints_are_finite_with_the_guard_alone(fault: str, cause: str, tmp_path: Path) -> None:
    """The moment's NaN comes in the step that the trainer saves after."""
    assert run(tmp_path, fault, guarded=False).startswith("finite [False, False]")
    assert run(tmp_path, fault, guarded=True).startswith("finite [True, True]")
    lines = (tmp_path / "guarded" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert {event["verdict"]["cause"] for event in events} == {cause}
    if fault == "inputs":  # the collator looks its rows up in a table: nothing proves whose they are
        rows = [["row 0 of micro-batch 0"], ["row 1 of micro-batch 0"]]
        assert all(event["sample_ids"] in rows for event in events)


@pytest.mark.thorough
def test_healthy_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    assert run(tmp_path, "", guarded=False) == run(tmp_path, "", guarded=True)
