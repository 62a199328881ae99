"""The contract of chat families, over every tiny variant: what training and inference both rely on."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases.chat import (
    FAMILY_OF,
    SIDES,
    ChatSubject,
    adapted,
    open_chat,
    padded,
)
from fuse_checks import Values, assert_equal, by
from peft import PeftModel
from torch import nn

from dit_lora.adapters.attach import is_lora_a, is_lora_b
from dit_lora.adapters.peft_format import load_chat_adapter, save_chat_adapter
from dit_lora.data.chat.rendered import IGNORE_INDEX
from dit_lora.families.chat_base import KINDS, generate_answer
from dit_lora.fuse.api import fuse
from dit_lora.fuse.patches import OPS, get_fusion
from dit_lora.numerics.streams import RandomStreams
from dit_lora.training.execution.activation_checkpointing import (
    CHECKPOINTING_MODES,
    set_checkpointing,
)

STREAMS = RandomStreams(0, (0, 1, 2))
# No answer depends on what the Q-Former's last layer makes of text, nor on layers after the one that is read.
LAST_OF_TEXT = tuple(f"qformer.encoder.layer.1.{part}." for part in ("intermediate", "output"))
UNUSED = {
    **dict.fromkeys((variant for variant in FAMILY_OF if variant.startswith("videochat2")), LAST_OF_TEXT),
    "llava-next-video": ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm."),
}


@pytest.fixture(params=FAMILY_OF)
def subject(request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path]) -> ChatSubject:
    return open_chat(request.param, tiny_checkpoints[request.param])


def losses(subject: ChatSubject, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return subject.checkpoint.losses(model, batch, STREAMS).losses


def test_every_variant_of_every_chat_family_is_under_the_contract() -> None:
    assert set(SIDES) == set(FAMILY_OF)


@pytest.mark.parametrize("kind", KINDS)
def test_a_samples_loss_is_the_stock_models_alone_whatever_its_neighbours_and_padding(
    subject: ChatSubject, kind: Any
) -> None:
    model, samples = subject.model(), subject.samples(kind)
    with torch.no_grad():
        output = subject.checkpoint.losses(model, padded(samples), STREAMS)
        wider = losses(subject, model, padded(samples, extra=7, pad=5))
        swapped = losses(subject, model, padded([samples[2], samples[1], samples[0]]))
        single_losses = [_stock_loss(subject, model, sample) for sample in samples]
    assert output.losses.dtype is torch.float32
    assert output.losses.shape == (3,)
    assert output.timesteps.tolist() == [KINDS.index(kind)] * 3
    torch.testing.assert_close(output.losses, torch.stack(single_losses), rtol=2e-5, atol=0)
    torch.testing.assert_close(wider, output.losses, rtol=2e-5, atol=0)
    torch.testing.assert_close(swapped.flip(0), output.losses, rtol=2e-5, atol=0)
    assert len({round(loss, 3) for loss in output.losses.tolist()}) == 3


def _stock_loss(subject: ChatSubject, model: Any, sample: Any) -> torch.Tensor:
    """By the model's own `labels=`, without padding."""
    model_inputs = subject.checkpoint.build_model_inputs(padded([sample]))
    labels = torch.tensor([sample.rendered.labels])
    assert (labels != IGNORE_INDEX).any()
    return model(**model_inputs, labels=labels).loss


@pytest.mark.parametrize("kind", ["video", "image"])
def test_pixels_reach_the_loss_of_their_own_sample_alone(subject: ChatSubject, kind: Any) -> None:
    model, batch = subject.model(), padded(subject.samples(kind))
    changed = {**batch, "pixels": batch["pixels"].clone()}
    changed["pixels"][1, -1] = 255 - changed["pixels"][1, -1]
    with torch.no_grad():
        before, after = (losses(subject, model, inputs) for inputs in (batch, changed))
    assert (before[1] - after[1]).abs() > 1e-4
    torch.testing.assert_close(before[[0, 2]], after[[0, 2]], rtol=1e-5, atol=0)


def test_a_gradient_reaches_all_that_trains_and_nothing_frozen(subject: ChatSubject) -> None:
    model = adapted(subject)
    for kind in ("video", "image"):  # a part of some connectors is for images alone
        losses(subject, model, padded(subject.samples(kind))).sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = [*trained]
    assert [n for n in names if is_lora_a(n)]
    assert [n for n in names if is_lora_b(n)]
    language = subject.family.lora_parent_modules
    assert all(any(part in n.split(".") for part in language) for n in names if ".lora_" in n)
    assert [n for n, p in model.named_parameters() if n not in trained and p.grad is not None] == []
    idle = [n for n, p in trained.items() if p.grad is None or not p.grad.any()]
    unused = [n for n in trained if any(pattern in n for pattern in UNUSED.get(subject.variant, ()))]
    assert idle == unused
    assert all(p.grad is None or p.grad.isfinite().all() for p in trained.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_of_training_is_what_answering_feeds_to_generate(subject: ChatSubject, kind: Any) -> None:
    """Tokens, pictures and the logits of the first word of the answer."""
    model, checkpoint = adapted(subject), subject.checkpoint
    answered = subject.samples(kind)
    questions = subject.samples(kind, answered=False)
    batch = padded(answered, extra=3)
    head = model.get_output_embeddings()
    for number, (sample, prompt) in enumerate(zip(answered, questions, strict=True)):
        ids, begun = sample.rendered.ids, prompt.rendered.ids
        assert begun == ids[: len(begun)]
        assert prompt.rendered.instruction == sample.rendered.instruction
        # Where it ends is the last turn's answer, but for white space that its first token may hold.
        first_answer_token = sample.rendered.labels.index(ids[len(begun)], len(begun))
        assert first_answer_token == len(begun)
        with torch.no_grad(), Outputs(head) as learned:
            losses(subject, model, batch)
        with Outputs(head) as outputs:
            checkpoint.answer(model, prompt.rendered, prompt.media.get("pixels"), 1)
        row = batch["answer_positions"][number].tolist().index(len(begun) - 1)
        logits = torch.cat([tensor.flatten(0, -2) for tensor in learned])
        at = number * batch["labels"].shape[1] + row
        torch.testing.assert_close(logits[at], outputs[0][0, -1], rtol=1e-4, atol=1e-5)


def test_an_answer_ends_where_its_format_ends_one(subject: ChatSubject) -> None:
    """By a text such as Vicuna's ###, wherever tokens begin and end; without one, where the length does."""
    model, checkpoint = adapted(subject), subject.checkpoint
    (prompt, *_) = subject.samples("text", answered=False)
    ids = torch.tensor([prompt.rendered.ids])
    model_inputs = checkpoint.build_model_inputs({"input_ids": ids})
    tokenizer = checkpoint.tokenizer
    head = model.get_output_embeddings()
    with Outputs(head) as steps:
        expected = generate_answer(model, tokenizer, model_inputs, 12)
    plain = re.search(r"[A-Za-z]{2}", expected)
    if plain is None:
        pytest.skip("the random model says no letters")
    end = plain[0]
    with Outputs(head) as fewer:
        ended = generate_answer(model, tokenizer, model_inputs, 12, end_text=end)
    assert ended == expected[: expected.index(end)].strip()
    assert len(fewer) < len(steps)


class Outputs:
    """What a module returns at each call within it."""

    def __init__(self, module: nn.Module) -> None:
        self.found: list[torch.Tensor] = []
        self.hook = module.register_forward_hook(lambda *call: self.found.append(call[-1].detach()))

    def __enter__(self) -> list[torch.Tensor]:
        return self.found

    def __exit__(self, *_error: object) -> None:
        self.hook.remove()


def test_the_saved_adapter_in_the_stock_model_is_the_trained_model(subject: ChatSubject, tmp_path: Path) -> None:
    """By `PeftModel.from_pretrained` and by `load_adapter`: the same logits, bit for bit."""
    trained = adapted(subject, base=False).eval()
    save_chat_adapter(trained, tmp_path, {})
    stock = subject.checkpoint.model_class.from_pretrained
    peft_model = PeftModel.from_pretrained(stock(subject.checkpoint.path), tmp_path).eval()
    loaded = stock(subject.checkpoint.path).eval()
    loaded.load_adapter(str(tmp_path))
    model_inputs = subject.checkpoint.build_model_inputs(padded(subject.samples()))
    with torch.no_grad():
        expected = trained(**model_inputs).logits
        assert torch.equal(peft_model(**model_inputs).logits, expected)
        assert torch.equal(loaded(**model_inputs).logits, expected)
        untrained = subject.model()(**model_inputs).logits
    assert (expected - untrained).abs().max() > 0.01


def test_base_weights_that_trained_come_back_beside_the_adapter(subject: ChatSubject, tmp_path: Path) -> None:
    trained = adapted(subject).eval()
    save_chat_adapter(trained, tmp_path, {})
    loaded = subject.model()
    load_chat_adapter(loaded, tmp_path)
    batch = padded(subject.samples())
    with torch.no_grad():
        expected = losses(subject, trained, batch)
        assert torch.equal(losses(subject, loaded, batch), expected)
        plain = losses(subject, subject.model(), batch)
    assert (plain - expected).abs().min() > 1e-4


def test_bf16_keeps_tables_in_fp32_and_stays_close_to_fp32(subject: ChatSubject) -> None:
    half, full = subject.model(torch.bfloat16), subject.model()
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    buffers, stored = dict(full.named_buffers()), half.state_dict()
    for name, buffer in half.named_buffers():
        expected = buffers[name]
        if name in stored and expected.is_floating_point():
            expected = expected.bfloat16()
        assert buffer.dtype is expected.dtype, name
        assert torch.equal(buffer, expected), name
    batch = padded(subject.samples())
    with torch.no_grad():
        rounded, exact = (losses(subject, model, batch) for model in (half, full))
    assert rounded.dtype is torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0)


def values(subject: ChatSubject, model: nn.Module, batch: dict[str, torch.Tensor]) -> Values:
    """Losses of three samples and every gradient; dropout draws the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        loss = losses(subject, model, batch)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        weights = torch.tensor([1.0, -0.7, 2.3])
        gradients = torch.autograd.grad((loss * weights).sum(), [*trained.values()], allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    return {"losses": loss.detach()} | {n: grad for n, grad in pairs if grad is not None}


def test_checkpointing_recomputes_the_same_bits(subject: ChatSubject) -> None:
    model, batch = adapted(subject).train(), padded(subject.samples())
    expected = values(subject, model, batch)
    for mode in CHECKPOINTING_MODES:
        set_checkpointing(model, mode)
        assert_equal(values(subject, model, batch), expected, 0.0)


def test_fused_lora_layers_are_pefts(subject: ChatSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    # Gradients of some biases are nothing but rounding, so LoRA alone.
    model, batch = adapted(subject, base=False).train(), padded(subject.samples())
    expected = values(subject, model, batch)
    with by("reference", monkeypatch):
        fuse(model, {op: "on" if op == "lora_linear" else "off" for op in OPS}, check=False)
        adapters = sum(is_lora_a(name) for name, _ in model.named_parameters())
        fused = get_fusion(model).get_active_ops()
        assert set(fused) == {"lora_linear"}, get_fusion(model).format_lines()
        assert str(adapters) in get_fusion(model).format_lines()[0]
        assert_equal(values(subject, model, batch), expected, 1e-4)


def test_one_seed_gives_the_same_bytes_and_another_gives_others(subject: ChatSubject, tmp_path: Path) -> None:
    def contents(root: Path) -> dict[str, bytes]:
        files = (path for path in sorted(root.rglob("*")) if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    torch.manual_seed(5)
    subject.family.build_tiny_checkpoint(subject.variant, tmp_path / "again", 0)
    subject.family.build_tiny_checkpoint(subject.variant, tmp_path / "other", 1)
    expected, other_content = contents(subject.checkpoint.path), contents(tmp_path / "other")
    assert contents(tmp_path / "again") == expected
    assert {name for name in expected if expected[name] != other_content[name]} == {"model.safetensors"}
