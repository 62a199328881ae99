"""The frozen base in host memory: the same bits, two blocks at most on the device, and everything at home at rest."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_chat_models
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from diffusers import CogVideoXPipeline
from runs import same_adapter, trajectory
from smoke_recipes import RUNS, smoke_args
from tiny_steps import CPU, VARIANTS, ChatStep, TinyStep, tiny_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from dit_lora.config.load import parse_recipe
from dit_lora.errors import DitLoraError
from dit_lora.families import get_families
from dit_lora.guard.fallbacks import convert_to_fp32
from dit_lora.numerics.transformer_blocks import repeated_blocks
from dit_lora.training.execution import offload
from dit_lora.training.execution.activation_checkpointing import (
    find_called_block,
    set_block_caller,
    set_checkpointing,
)
from dit_lora.training.execution.offload import WeightOffloader, get_device_placement, offload_base

LAYERS = 5
Main = Callable[[list[str]], None]


class Elsewhere:
    """Stands for a second device: a weight that is not there is NaN, and one that is sent away becomes NaN there."""

    def __init__(
        self,
        transformer: nn.Module,
        monkeypatch: pytest.MonkeyPatch,
        called_alone: Sequence[str] = (),
    ) -> None:
        self.there: list[Any] = []
        self.most = 0
        self.early: list[bool] = []
        """Whether what was brought was for a block to come."""

        def bring(group: Any, _device: torch.device) -> None:
            assert group not in self.there
            self.there.append(group)
            self.early.append(group is not self.offload._last_two_groups[1])
            self.most = max(self.most, len(self.there))
            for parameter, host_tensor in zip(group.parameters, self.home[group], strict=True):
                parameter.data = host_tensor.clone()

        def send_away(group: Any) -> None:
            self.there.remove(group)
            for parameter in group.parameters:
                parameter.data.fill_(torch.nan)  # autograd may hold it too
                parameter.data = torch.full_like(parameter, torch.nan)

        monkeypatch.setattr(offload._FrozenBlockWeights, "load_weights_to_device", bring)
        monkeypatch.setattr(offload._FrozenBlockWeights, "release_device_weights", send_away)
        self.offload = WeightOffloader(transformer, CPU, called_alone)
        self.home = {g: [p.data for p in g.parameters] for g in self.offload.groups.values()}
        for group in self.home:
            for parameter in group.parameters:
                parameter.data = torch.full_like(parameter, torch.nan)


def a_step(paths: dict[str, Path], name: str) -> Any:
    chat = name in tiny_chat_models.MODELS
    return ChatStep.of(name) if chat else tiny_step(paths, name, dropout=0.3)


IN_CI = ("latte", "dit-tiny", "videochat2")


def deep(paths: dict[str, Path], **given: Any) -> TinyStep:
    """A CogVideoX of several blocks, checkpointed."""
    step = tiny_step(paths, "cogvideox-5b", scratch={"num_layers": LAYERS}, **given)
    set_checkpointing(step.transformer, "full")
    return step


@pytest.mark.parametrize(
    "variant",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.thorough)
        for name in (*VARIANTS, *tiny_chat_models.MODELS)
    ],
)
def test_a_step_has_the_same_bits_and_reads_no_weight_that_is_away(
    tiny_checkpoints: dict[str, Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(tiny_checkpoints, variant)
    first_parameter, called = next(step.transformer.parameters()), []

    def note(block: nn.Module, *args: Any) -> Any:
        called.append(find_called_block(block))
        return checkpoint(block, *args, use_reentrant=False)

    set_block_caller(step.transformer, note)
    expected, loss = step.gradients(), step.loss()
    assert set(called) == set(repeated_blocks(step.transformer))
    set_checkpointing(step.transformer, "full")
    families = get_families().values()
    called_directly = next(
        (family.directly_called_modules for family in families if variant in family.tiny_variants),
        (),
    )
    device = Elsewhere(step.transformer, monkeypatch, called_directly)
    for _ in range(2):  # the order of blocks is known the second time
        assert torch.equal(step.loss(), loss)
        grads = step.gradients()
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[name], expected[name]) for name in expected)
        assert device.there == []
    # Models are asked where they are by their first weight.
    assert not any(first_parameter is p for group in device.home for p in group.parameters)


def test_two_blocks_at_most_are_on_the_device_and_the_next_one_comes_early(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = deep(tiny_checkpoints)
    expected = step.gradients()
    device = Elsewhere(step.transformer, monkeypatch)
    step.gradients()
    assert device.early == 2 * LAYERS * [False]
    device.early.clear()
    grads = step.gradients()
    # All but the first of the forward pass and of the backward pass.
    assert device.early == 2 * [False, *[True] * (LAYERS - 1)]
    assert device.most == 2
    with torch.no_grad():
        step.loss()
    assert device.there == []
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_what_trains_never_moves(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters, and a base weight of a block that trains."""
    step = deep(tiny_checkpoints)
    base: Any = repeated_blocks(step.transformer)[1].get_parameter("norm1.linear.weight")
    base.requires_grad_()
    trained = {n: p for n, p in step.transformer.named_parameters() if p.requires_grad}
    addresses = {name: parameter.data_ptr() for name, parameter in trained.items()}
    device = Elsewhere(step.transformer, monkeypatch)
    grads = step.gradients()
    assert grads.keys() == addresses.keys()
    assert {name: parameter.data_ptr() for name, parameter in trained.items()} == addresses
    assert not any(p.requires_grad for group in device.home for p in group.parameters)


def test_a_pass_that_raises_leaves_everything_in_host_memory(
    tiny_checkpoints: dict[str, Path],
) -> None:
    step = deep(tiny_checkpoints)
    expected = step.gradients()
    offloader = WeightOffloader(step.transformer, CPU)
    host_addresses = {p: p.data_ptr() for group in offloader.groups.values() for p in group.parameters}
    block = repeated_blocks(step.transformer)[2]

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory, say")

    hook = block.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        step.loss()
    assert offloader.resident_groups == []
    hook.remove()

    loss = step.loss()
    hook = block.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        loss.backward()
    hook.remove()
    step.transformer.zero_grad()
    grads = step.gradients()
    assert offloader.resident_groups == []
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert {p: p.data_ptr() for p in host_addresses} == host_addresses


def test_a_diagnosis_in_fp32_computes_every_block_in_fp32(
    tiny_checkpoints: dict[str, Path],
) -> None:
    """It puts other values in the weights' place, for a while."""
    step = deep(tiny_checkpoints, mixed="bf16")
    offloader, recorded = WeightOffloader(step.transformer, CPU), []
    host_addresses = {p: p.data_ptr() for group in offloader.groups.values() for p in group.parameters}
    for block, group in offloader.groups.items():
        block.register_forward_pre_hook(
            lambda _block, _inputs, group=group: recorded.append({p.dtype for p in group.parameters})
        )
    with convert_to_fp32(step.transformer):
        step.loss().backward()
    assert recorded == 2 * LAYERS * [{torch.float32}]
    assert {p: p.data_ptr() for p in host_addresses} == host_addresses


def accelerator() -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True)


def test_accelerate_leaves_an_offloaded_model_where_it_is(
    tiny_checkpoints: dict[str, Path], recipe_values: dict[str, Any]
) -> None:
    step, other_layer = deep(tiny_checkpoints), nn.Linear(2, 2)
    offload_base(parse_recipe(recipe_values, "test"), step.transformer, accelerator())
    assert get_device_placement(step.transformer, other_layer) is None
    recipe_values["train"] |= {"offload": "group", "checkpointing": "auto"}
    recipe = parse_recipe(recipe_values, "test")
    assert recipe.train.effective_checkpointing == "full"
    offload_base(recipe, step.transformer, accelerator())
    assert get_device_placement(step.transformer, other_layer) == [False, True]
    ignored: Any = step.transformer._ddp_params_and_buffers_to_ignore
    assert {n for n, p in step.transformer.named_parameters() if not p.requires_grad} > ignored
    assert {n for n in ignored if not n.startswith("transformer_blocks.")} == set()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"checkpointing": "none"}, "needs checkpointing=full .*got checkpointing=none"),
        ({"checkpointing": "selective"}, "needs checkpointing=full .*got checkpointing=selective"),
        ({"checkpointing": "auto", "mode": "full"}, "mode=full, which has no frozen weights"),
    ],
)
def test_a_recipe_whose_weights_would_not_come_back_is_refused(
    recipe_values: dict[str, Any], given: dict[str, str], words: str
) -> None:
    recipe_values["train"] |= {"offload": "group", **given}
    with pytest.raises(DitLoraError, match=words):
        parse_recipe(recipe_values, "test")


def test_a_model_with_nothing_to_offload_is_refused(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DitLoraError, match="Linear has no gradient checkpointing"):
        WeightOffloader(nn.Linear(2, 2), CPU)
    transformer = deep(tiny_checkpoints).transformer
    weight: Any = transformer.get_submodule("transformer_blocks.0.ff.net.2")
    original_weight = weight.weight
    weight.weight = nn.Parameter(original_weight.to(torch.int8), requires_grad=False)
    with pytest.raises(DitLoraError, match=r"weights of CogVideoX.* are quantised"):
        WeightOffloader(transformer, CPU)
    weight.weight = original_weight
    for block in repeated_blocks(transformer):
        block.requires_grad_()
    with pytest.raises(DitLoraError, match=r"no block of CogVideoX.* has frozen weights"):
        WeightOffloader(transformer, CPU)


def test_a_launch_that_places_the_weights_itself_is_refused(
    recipe_values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_values["train"] |= {"offload": "group", "checkpointing": "auto"}
    launched = accelerator()
    monkeypatch.setattr(type(launched), "distributed_type", DistributedType.FSDP)
    with pytest.raises(DitLoraError, match=r"train.offload=group: FSDP places the weights itself"):
        offload_base(parse_recipe(recipe_values, "test"), nn.Linear(2, 2), launched)


# One of each model's blocks, and what is encoded otherwise.
OFFLOADED = (
    *("sana", "flux", "flux_kontext_masked", "flux2", "flux2_dev_edit", "krea2", "qwen_image", "chroma"),
    *("ernie_image", "ideogram4", "anima", "qwen_image21", "kandinsky5", "hunyuan_video15"),
    *("qwen_image_edit_masked", "qwen_image_edit_plus", "ltx_video", "ltx_video_i2v", "ltx2"),
    *("ltx2_sound", "ltx2_i2v", "ltx2_ic_lora", "ltx2_ic_lora_sound", "sd3", "wan", "z_image"),
)


@pytest.mark.parametrize(
    "name",
    ["cogvideox", *(pytest.param(name, marks=pytest.mark.thorough) for name in OFFLOADED)],
)
def test_a_recipe_trains_samples_and_resumes_with_the_same_bits(
    lora_main: Main,
    tiny_checkpoints: dict[str, Path],
    shape_clips: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    smoke = RUNS[name]
    smoke.prepare(monkeypatch)
    common = [
        *smoke_args(name, tiny_checkpoints, shape_clips, tmp_path),
        *smoke.sampled(smoke.write_pictures(tmp_path), smoke.write_references(tmp_path)),
        "train.checkpointing=auto",
        "train.save_every=2",
        *(("data.height=32", "data.width=48") if name == "cogvideox" else ()),
    ]
    plain, away = tmp_path / "plain", tmp_path / "away"
    lora_main([*common, "train.steps=4", f"run.dir={plain}"])
    common += ["train.offload=group", f"run.dir={away}"]
    lora_main([*common, "train.steps=2"])
    lora_main([*common, "train.steps=4", "train.resume=auto"])
    assert trajectory(away) == trajectory(plain)
    assert same_adapter(away, plain)
    for sample in (plain / "samples" / "step_000004").iterdir():
        assert (away / "samples" / "step_000004" / sample.name).read_bytes() == sample.read_bytes()
    if name == "cogvideox":
        pipe = CogVideoXPipeline.from_pretrained(tiny_checkpoints[smoke.variant])
        pipe.load_lora_weights(away / "adapter")
        assert pipe.get_active_adapters()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_step_on_cuda_holds_two_blocks_of_the_base(tiny_checkpoints: dict[str, Path]) -> None:
    """Blocks of 100 MiB and more each, so that activations of a step are small in comparison."""
    wide_config = {"num_layers": 8, "num_attention_heads": 32, "attention_head_dim": 64}
    gpu, peaks, results = torch.device("cuda"), {}, {}
    for mode in ("none", "group"):
        step = tiny_step(tiny_checkpoints, "cogvideox-5b", scratch=wide_config)
        set_checkpointing(step.transformer, "full")
        if mode == "group":
            offloader = WeightOffloader(step.transformer, gpu)
        else:
            step.transformer.to(gpu)
        step.batch = {name: tensor.to(gpu) for name, tensor in step.batch.items()}
        step.gradients()  # cuBLAS takes its workspaces, and the order of blocks is learned
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results[mode] = step.gradients()
        torch.cuda.synchronize()
        peaks[mode] = torch.cuda.max_memory_allocated()
        assert torch.cuda.memory_allocated() - before < 2**26
        del step
    blocks = [sum(p.nbytes for p in group.parameters) for group in offloader.groups.values()]
    assert peaks["none"] - peaks["group"] > 0.9 * (sum(blocks) - 2 * max(blocks))
    # Not to the bit: on CUDA the backward of PyTorch's attention adds in no fixed order.
    for name, grad in results["none"].items():
        difference = torch.linalg.vector_norm(results["group"][name] - grad)
        assert difference <= 1e-4 * torch.linalg.vector_norm(grad), name


def test_the_guard_can_keep_the_base_on_the_device_for_an_experiment(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(tiny_checkpoints, "dit-tiny")
    set_checkpointing(step.transformer, "full")
    expected = step.gradients()
    elsewhere = Elsewhere(step.transformer, monkeypatch)
    step.transformer.__dict__[offload._OFFLOAD_KEY] = elsewhere.offload
    fallback = offload.make_offload_fallback(step.transformer)
    assert fallback is not None
    with fallback.disable_temporarily():
        assert len(elsewhere.there) == len(elsewhere.home)
        grads = step.gradients()
        assert len(elsewhere.there) == len(elsewhere.home)
    assert elsewhere.there == []
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert offload.make_offload_fallback(nn.Linear(2, 2)) is None
