"""TRL's SFT and DPO trainers under the guard's command: their scripts have no line of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, launch_environment

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SCRIPT = """
import sys
import torch
from pathlib import Path
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from chat_tokenizers import llama_tokenizer

kind, fault = sys.argv[1:3]
tokenizer = llama_tokenizer()
tokenizer.pad_token, tokenizer.bos_token = tokenizer.eos_token, "<s>"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256))
model.save_pretrained("model")
model = LlamaForCausalLM.from_pretrained("model")
weight = model.model.layers[1].mlp.up_proj.weight
marked = tokenizer.convert_tokens_to_ids("<image>")

def spoil_rows(module, args, output):
    rows = (args[0] == marked).any(-1)
    if not rows.any():
        return None
    output = output.clone()
    output[rows, 2, 3] = float("nan")
    return output

class Fault(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step != 3:
            return
        if fault == "weight":
            weight.data[1, 2] = float("nan")
        if fault == "moment":
            optimizer.state[weight]["exp_avg"][1, 2] = float("nan")
        if fault == "gradient":
            handle = weight.register_hook(lambda gradient: (handle.remove(), gradient * torch.inf)[1])

texts = [f"The video contains {n} frames and a dog runs" for n in range(8)]
if fault == "data":
    model.get_input_embeddings().register_forward_hook(spoil_rows)
common = dict(output_dir="out", max_steps=8, per_device_train_batch_size=2, save_strategy="no", report_to=[],
    use_cpu=True, learning_rate=1e-3, disable_tqdm=True, bf16=False, gradient_checkpointing=False)
if kind == "sft":
    texts[5] = "<image> " + texts[5]
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(model, args=SFTConfig(**common, max_length=32), train_dataset=data,
        processing_class=tokenizer, callbacks=[Fault()])
else:
    chosen = [f"a dog runs through {n}" for n in range(8)]
    chosen[5] = "<image> " + chosen[5]
    data = Dataset.from_dict({"prompt": texts, "chosen": chosen, "rejected": ["the cat sleeps"] * 8})
    trainer = DPOTrainer(model, args=DPOConfig(**common, max_length=64), train_dataset=data,
        processing_class=tokenizer, callbacks=[Fault()])
trainer.train()
torch.save({name: one.detach() for name, one in trainer.model.named_parameters()}, "out.pt")
print("finite", all(bool(one.isfinite().all()) for one in trainer.model.parameters()))
"""


def run(folder: Path, kind: str, fault: str, *, guarded: bool) -> str:
    (folder / "train.py").write_text(SCRIPT)
    guard = ("-m", "dit_lora.guard", "--folder", "guarded") if guarded else ()
    shutil.copy(ROOT / "tests" / "chat_tokenizers.py", folder)
    process = subprocess.run(
        [sys.executable, *guard, "train.py", kind, fault],
        cwd=folder,
        capture_output=True,
        text=True,
        env=launch_environment(),
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        ("data", "inputs", "other samples are healthy"),
        (
            "gradient",
            "transient",
            "the gradient of model.layers.1.mlp.up_proj.weight was not finite",
        ),
        ("moment", "optimizer", "model.layers.1.mlp.up_proj.weight/exp_avg"),
        ("weight", "weights", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_fault_is_named_and_ruins_nothing(kind: str, fault: str, cause: str, words: str, tmp_path: Path) -> None:
    assert run(tmp_path, kind, fault, guarded=False) == "finite False"
    assert run(tmp_path, kind, fault, guarded=True) == "finite True"
    lines = (tmp_path / "guarded" / "events.jsonl").read_text().splitlines()
    for event in map(json.loads, lines):
        assert event["verdict"]["cause"] == cause
        assert words in event["verdict"]["words"]
        if fault == "data":
            # The row has the tokens of one item, wherever rows of chosen and rejected answers come.
            assert event["sample_ids"] == ["dataset index 5"]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_healthy_training_is_the_same_bit_for_bit(kind: str, tmp_path: Path) -> None:
    import torch

    saved = []
    for guarded in (False, True):
        run(tmp_path, kind, "", guarded=guarded)
        saved.append(torch.load(tmp_path / "out.pt", weights_only=True))
    unguarded, watched = saved
    assert unguarded.keys() == watched.keys()
    assert all(torch.equal(unguarded[name], watched[name]) for name in unguarded)
    assert not (tmp_path / "guarded" / "events.jsonl").exists()
