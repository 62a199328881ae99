"""What a memory budget is computed from: model on the meta device, tensors of a sample of each shape, encoders."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKL
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dit_lora.adapters.groups import find_base_members
from dit_lora.adapters.quantize import count_quantized_bytes
from dit_lora.config.data import VideoShape
from dit_lora.config.recipe import Recipe
from dit_lora.data.buckets.buckets import list_buckets
from dit_lora.data.cache.cache import Spec
from dit_lora.data.loading.encoded import build_guided_spec, build_preserve_spec
from dit_lora.data.media.sound import Sound
from dit_lora.families import CHAT_FAMILIES
from dit_lora.families.latents import VaeMemory
from dit_lora.families.without_weights import build_from_configs, build_text_encoders, is_data_available
from dit_lora.fuse import api, fp8, kernel_support
from dit_lora.numerics.streams import RandomStreams
from dit_lora.numerics.transformer_blocks import find_weights_read_outside, repeated_blocks
from dit_lora.patching import Patches
from dit_lora.planning.chat_shapes import compute_chat_specs
from dit_lora.planning.step import emulate_autocast, measure_step_peak
from dit_lora.training.execution.activation_checkpointing import CheckpointingMode
from dit_lora.training.execution.activations import PeakBytes, measure_activations
from dit_lora.training.execution.fake_step import CPU, AllocationTracker, FakeStep, Losses, count_tensor_bytes
from dit_lora.training.replayable_batch import compute_training_losses
from dit_lora.training.tasks.diffusion.cache_plan import DecodedSample
from dit_lora.training.tasks.diffusion.samples import BucketedSample, find_samples
from dit_lora.training.tasks.registry import get_task_of_family

T = TypeVar("T")


@dataclass(frozen=True)
class ModelWeights:
    """Bytes of a model on one device, and its trained parameters."""

    frozen_bytes: int
    """Frozen weights as stored: in the dtype of the run, or as `model.quantize` says."""
    block_bytes: int
    """Bytes of the frozen weights in blocks that can be offloaded."""
    largest_block_bytes: int
    """Bytes of one block, trained weights included."""
    trained_parameters: tuple[torch.Tensor, ...]
    """The trained parameters, fp32, on the meta device."""

    @property
    def trained_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.trained_parameters)


@dataclass(frozen=True)
class EncoderMemory:
    """Memory of one encoder that encodes one sample."""

    weight_bytes: int
    peak_bytes: int
    """Peak bytes without its weights."""


@dataclass
class MemoryEstimator:
    """Computes the memory needs of one opened checkpoint. Each count is computed when first used, and cached."""

    recipe: Recipe
    """The recipe from `config_only_recipe`: `model.path` is a folder with configs and no weights."""
    family: Any
    checkpoint: Any
    dtype: torch.dtype
    is_gpu: bool
    """True to count as on a GPU: with CUDA's autocast and fused kernels."""
    _cache: dict[Hashable, Any] = field(default_factory=dict)

    def _get_cached(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Cached result of `compute`, which is only called the first time for this key."""
        if key not in self._cache:
            self._cache[key] = compute()
        value: T = self._cache[key]
        return value

    @property
    def is_chat(self) -> bool:
        return self.recipe.model.family in CHAT_FAMILIES

    def get_meta_model(self, recipe: Recipe) -> nn.Module:
        """The model on the meta device, with adapter and kernels, in training mode. `model.quantize` is ignored."""
        unquantized = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": None})})

        def load_trainable_on_meta() -> nn.Module:
            # Parameters on the meta device have shapes and no memory.
            with _build_models_on_meta_device(), _assume_gpu_kernels(self.is_gpu):
                model, _, _ = get_task_of_family(recipe.model.family).load_trainable(
                    unquantized, self.family, self.checkpoint, self.dtype
                )
            return model.train()

        return self._get_cached(("model", _get_model_key(recipe)), load_trainable_on_meta)

    def count_weights(self, recipe: Recipe) -> ModelWeights:
        """Bytes of the transformer's weights. The effect of `model.quantize` is computed, not applied."""
        model = self.get_meta_model(recipe)
        trained = [p for p in model.parameters() if p.requires_grad]
        frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        # Parameters that are also read outside their block stay on the device: they cannot be offloaded.
        blocks = repeated_blocks(model)
        fixed = {id(p) for p in find_weights_read_outside(model, self.family.directly_called_modules)}
        in_blocks = [
            sum(p.nbytes for p in block.parameters() if not p.requires_grad and id(p) not in fixed) for block in blocks
        ]
        # Only weights in blocks are quantized, so the same bytes are subtracted from the blocks.
        narrowed = self._count_quantization_savings(recipe)
        largest = max((sum(p.nbytes for p in block.parameters()) for block in blocks), default=0)
        return ModelWeights(
            frozen - narrowed + fp8.count_fp8_bytes(model),
            sum(in_blocks) - narrowed,
            largest - narrowed // max(1, len(blocks)),
            tuple(trained),
        )

    def count_guidance_transformer_bytes(self, recipe: Recipe) -> int:
        """Bytes of the frozen transformers that samples need in addition to the trained one, in the run's dtype."""
        number = 0 if self.is_chat else self.checkpoint.sampler.num_guidance_transformers
        return number * sum(p.nbytes for p in self.get_meta_model(recipe).parameters() if not p.requires_grad)

    def _count_quantization_savings(self, recipe: Recipe) -> int:
        kind = recipe.model.quantize
        if kind is None:
            return 0

        def load_meta_base_model() -> nn.Module:
            # The base without an adapter, whose layers have the names that quantization uses.
            load_base = self.checkpoint.load_model if self.is_chat else self.checkpoint.denoiser.load_transformer
            with _build_models_on_meta_device():
                base_model: nn.Module = load_base(self.dtype)
            return base_model

        base_model = self._get_cached("bare", load_meta_base_model)
        names = find_base_members(base_model, recipe.optim.groups, self.family.group_patterns)
        return count_quantized_bytes(base_model, None) - count_quantized_bytes(base_model, kind, names)

    @cached_property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes of the recipe's samples, the largest first."""
        return tuple(sorted(self._specs, key=lambda shape: shape.volume, reverse=True))

    def get_spec(self, shape: Any) -> Spec:
        """Shapes and dtypes of one sample's cached tensors."""
        return self._specs[shape][0]

    @cached_property
    def _specs(self) -> dict[Any, tuple[Spec, Mapping[str, torch.Tensor]]]:
        """For each shape: specs of a sample's tensors, and tensors with values that the model's shapes depend on."""
        if self.is_chat:
            return compute_chat_specs(self.recipe, self.checkpoint)
        # A set: samples of equal shape need one computation. Without data, all buckets of the recipe.
        used = {sample.shape for sample in self.samples or ()}
        buckets = used or list_buckets(
            self.recipe.data, self.checkpoint.info.size_multiple, self.checkpoint.info.unsupported_reason
        )
        shapes = [self._add_reference_shapes(shape) for shape in buckets]
        # Here, because loading a VAE that lacks these methods with tiling or slicing would fail.
        info, sizes = self.checkpoint.info, sorted({(shape.height, shape.width) for shape in shapes})
        VaeMemory.from_config(self.recipe.data).require_tiling_support(info.path.name, info.vae_config, sizes)
        return {shape: (self._compute_encoded_spec(shape), {}) for shape in shapes}

    @cached_property
    def samples(self) -> Sequence[BucketedSample] | None:
        """Samples to train on of a diffusion model; None if `data.path` does not exist here, and for chat models."""
        if self.is_chat or not is_data_available(self.recipe):
            return None
        usable = find_samples(self.recipe, self.checkpoint.info, samples_per_step=1, quiet=True).usable
        return [sample for sample in usable if not sample.clip.is_held_out]

    def _add_reference_shapes(self, shape: VideoShape) -> VideoShape:
        """The shape with as many references as a validation prompt has; unchanged if the data has them."""
        # None for models without references.
        takes = self.checkpoint.info.reference_spec
        if takes is None or shape.references or self.samples is not None:
            return shape
        number = max((len(files) for files in self.recipe.validation.references), default=0)
        return takes.assume_reference_shapes(shape, number)

    @property
    def _validation_shape(self) -> VideoShape:
        shape = VideoShape.from_data(self.recipe.data)
        return replace(shape, references=self.shapes[0].references)

    def _compute_encoded_spec(self, shape: VideoShape) -> Spec:
        """Shapes and dtypes of a sample's cached tensors: the encoders' outputs for its pixels and its caption."""
        encoded, _ = self._encode_fake_sample(shape)
        video = {name: (tensor.shape, tensor.dtype) for name, tensor in encoded.items()}
        text = self.checkpoint.encoders.text_spec(self.dtype)
        preserved = build_preserve_spec(text) if self.recipe.train.preserve else {}
        return video | text | preserved | (build_guided_spec(text) if self.recipe.train.target == "guided" else {})

    def _encode_fake_sample(self, shape: VideoShape) -> tuple[Mapping[str, torch.Tensor], int]:
        """Encode one fake sample of this shape. Returns the video encoder's outputs and its peak in bytes."""
        encode, encoders, fake = self._encoders

        def run_encoders() -> tuple[Mapping[str, torch.Tensor], int]:
            # (F, 3, H, W), uint8 as decoded.
            size = (shape.frames, 3, shape.height, shape.width)
            with fake:
                pixels, *references = (
                    torch.empty((module.frames, 3, module.height, module.width), dtype=torch.uint8, device=CPU)
                    for module in (shape, *shape.references)
                )
            # The first frame, (3, H, W): a real tensor, created outside of the fake mode.
            first_frame = torch.zeros(size[1:], dtype=torch.uint8)
            masked = any(source.has_masks for source in self.recipe.data.all_sources)
            mask = torch.ones(shape.height, shape.width) if masked else None
            encoder_tensors = [t for module in encoders for t in (*module.parameters(), *module.buffers())]
            # Tensors that exist before are not counted in the peak.
            with AllocationTracker([*encoder_tensors, pixels]) as live:
                sound, sound_format, fps = None, self.checkpoint.encoders.sound_format, self.recipe.data.fps
                # Silent audio, (channels, samples), if both model and data have audio.
                if sound_format is not None and fps is not None:
                    silence = torch.zeros(sound_format.channels, sound_format.count_samples(shape.frames, fps))
                    sound = Sound(silence, sound_format.rate)
                sample = DecodedSample(pixels, first_frame, tuple(references), mask, sound)
                encoded = sample.encode_sample(encode, shape)
            return encoded, live.max_bytes

        return self._get_cached(shape, run_encoders)

    @cached_property
    def _encoders(self) -> tuple[Any, list[nn.Module], FakeTensorMode]:
        """The function that encodes a sample, its models, and the fake mode that they live in.

        The VAE is the first model; a model that needs its own encoder for a first image has a second one.
        """
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        # Models that are loaded inside are built from their configs, with fake weights, and collected in the list.
        with fake, build_from_configs() as built:
            memory = VaeMemory.from_config(self.recipe.data)
            encode = self.checkpoint.encoders.load_video_encoder(self.dtype, CPU, memory=memory)
        return encode, built, fake

    @cached_property
    def video_encoder(self) -> EncoderMemory:
        """Memory of encoding one sample of the largest shape."""
        _, encoders, _ = self._encoders
        weights = sum(count_tensor_bytes(encoder.parameters()) for encoder in encoders)
        return EncoderMemory(weights, self._encode_fake_sample(self.shapes[0])[1])

    @cached_property
    def video_decoding_memory(self) -> EncoderMemory:
        """Memory of decoding one sample of the shape in `data`. An image autoencoder decodes one frame at a time."""
        _, encoders, fake = self._encoders
        vae: Any = encoders[0]
        size, _ = self._compute_encoded_spec(self._validation_shape)["latent_mean"]
        # (C, F, h, w) of a video to (C, h, w) of one frame.
        if isinstance(vae, AutoencoderKL) and len(size) == 4:
            size = torch.Size([size[0], *size[2:]])
        with fake:
            # A batch of one sample.
            latents = torch.empty((1, *size), dtype=vae.dtype, device=CPU)
            # Decoders of LTX-Video 0.9.1 and later take a timestep.
            timestep = [latents.new_empty(1)] if vae.config.get("timestep_conditioning") else []
        with torch.no_grad(), AllocationTracker([*vae.parameters(), *vae.buffers(), latents]) as live:
            vae.decode(latents, *timestep)
        return EncoderMemory(count_tensor_bytes(vae.parameters()), live.max_bytes)

    @cached_property
    def caption_encoder(self) -> EncoderMemory | None:
        """Memory of encoding one caption of maximum length; None without a text encoder or without its config.

        Several encoders are loaded together and run one after the other. Of the modules that process captions after
        them (connectors), only the weights are counted.
        """
        path = self.checkpoint.path
        with FakeTensorMode(allow_non_fake_inputs=True), build_from_configs():
            models = build_text_encoders(path, self.dtype)
            connectors = [
                kind.from_pretrained(path, subfolder=name, dtype=self.dtype)
                for name, kind in self.checkpoint.encoders.text_postprocessors.items()
            ]
        # The maximum number of tokens of a caption, if the family sets one.
        limit, peak_bytes = self.checkpoint.encoders.text_cache_key().get("tokens"), 0
        for model in models:
            config: Any = model.config
            # T5 has relative positions, so its config has no limit.
            positions = getattr(config.get_text_config(), "max_position_embeddings", limit)
            tokens = min(limit or positions, positions)
            with torch.no_grad(), AllocationTracker([*model.parameters(), *model.buffers()]) as live:
                # Token ids (1, tokens); their values do not change the memory.
                model(torch.ones((1, tokens), dtype=torch.int64))
            peak_bytes = max(peak_bytes, live.max_bytes)
        weights = sum(count_tensor_bytes(model.parameters()) for model in (*models, *connectors))
        return EncoderMemory(weights, peak_bytes) if models else None

    def measure_activations(self, recipe: Recipe, shape: Any) -> PeakBytes:
        """Bytes of a micro-batch's activations, by checkpointing mode."""
        size, model = recipe.train.batch_size, self.get_meta_model(recipe)

        def measure_needs() -> PeakBytes:
            batch, integers = (self._get_batch_spec(self.get_spec(shape), size), self.get_integer_inputs(shape, size))
            with emulate_autocast(model, self.dtype, is_gpu=self.is_gpu):
                return measure_activations(model, self._make_loss_function(size), batch, CPU, integers)

        return self._get_cached(("needs", _get_model_key(recipe), size, shape), measure_needs)

    def measure_peak(self, recipe: Recipe, shape: Any, mode: CheckpointingMode) -> int:
        """Peak bytes of a whole micro-step, with gradients."""
        size, model = recipe.train.batch_size, self.get_meta_model(recipe)
        # With accumulation, gradients of earlier micro-steps are in memory during every pass but the first.
        exist = recipe.train.accumulate > 1

        def measure_micro_step() -> int:
            batch, integers = (self._get_batch_spec(self.get_spec(shape), size), self.get_integer_inputs(shape, size))
            losses = self._make_loss_function(size)
            with emulate_autocast(model, self.dtype, is_gpu=self.is_gpu):
                return measure_step_peak(model, losses, batch, mode, integer_inputs=integers, has_gradients=exist)

        return self._get_cached(("peak", _get_model_key(recipe), size, exist, shape, mode), measure_micro_step)

    def measure_inference_peak(self, recipe: Recipe) -> int:
        """Peak bytes of one denoising call in validation. Guidance may double the batch."""
        guided = recipe.validation.guidance_scale > self.checkpoint.sampler.guidance_threshold
        # Guidance may run the conditional and the unconditional prediction as one batch.
        size = self.checkpoint.sampler.guidance_batch_size if guided else 1
        model = self.get_meta_model(recipe)

        def measure_denoising() -> int:
            spec = self._compute_encoded_spec(self._validation_shape)
            # Without dropout, as in sampling.
            step = FakeStep(model.eval(), self._get_batch_spec(spec, size))
            try:
                with (
                    torch.no_grad(),
                    emulate_autocast(model, self.dtype, is_gpu=self.is_gpu),
                    step.track_allocations() as live,
                ):
                    step.run_on_fake_weights(self._make_loss_function(size))
            finally:
                model.train()
            return live.max_bytes

        return self._get_cached(("inference", _get_model_key(recipe), size), measure_denoising)

    def count_sample_bytes(self, shape: Any) -> int:
        """Bytes of one sample's cached tensors."""
        return sum(size.numel() * dtype.itemsize for size, dtype in self.get_spec(shape).values())

    def count_noise_bytes(self, shape: Any) -> int:
        """Bytes of the random tensors (such as noise) that a step draws for one sample."""
        batch = {
            name: torch.empty(size, dtype=dtype, device="meta")
            for name, (size, dtype) in self._get_batch_spec(self.get_spec(shape), 1).items()
        }
        noise = RandomStreams(0, [0]).draw_random_tensors(self.checkpoint.get_random_input_samplers(batch), CPU)
        return sum(tensor.nbytes for tensor in noise.values())

    def _get_batch_spec(self, spec: Spec, size: int) -> Spec:
        return {n: (torch.Size([size, *sample_size]), dtype) for n, (sample_size, dtype) in spec.items()}

    def get_integer_inputs(self, shape: Any, size: int) -> dict[str, torch.Tensor]:
        """Integer tensors of a micro-batch, such as token ids, that the model's shapes depend on."""
        integers = self._specs[shape][1]
        # The same values for each sample of the batch, as a view.
        return {name: tensor.expand(size, *tensor.shape) for name, tensor in integers.items()}

    def _make_loss_function(self, size: int) -> Losses:
        streams = RandomStreams(self.recipe.train.seed, range(size))
        return lambda model, batch: compute_training_losses(self.checkpoint, model, batch, streams)


def _get_model_key(recipe: Recipe) -> str:
    """Cache key of a model without weights: the recipe fields that change the model's structure."""
    return repr((recipe.lora, recipe.optim.groups, recipe.train.mode, recipe.kernels))


@contextmanager
def _build_models_on_meta_device() -> Iterator[None]:
    """Context in which models are built from their configs, on the meta device."""
    with torch.device("meta"), build_from_configs():
        yield


@contextmanager
def _assume_gpu_kernels(is_enabled: bool) -> Iterator[None]:
    """Context in which the kernel mode `auto` behaves as if a GPU were present."""
    patches = Patches()
    if is_enabled:
        gpu_support = kernel_support()._replace(mode="gpu", reason="assumed")
        # The wrappers ignore the original, which would look at this machine.
        patches.wrap_method(api, "triton_support", lambda _own: gpu_support)
        patches.wrap_method(api, "why_no_fp8", lambda _own: None)
    try:
        yield
    finally:
        patches.undo()
