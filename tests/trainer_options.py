"""Options of trainers that have a page of their own, as they are called there; each has one row on its page.

Read on 2026-11-24 at the commits that the pages name. Names with a common beginning may stand as `--beginning_*`.
"""


def _words(*texts: str) -> list[str]:
    return [word for text in texts for word in text.split()]


_JOB = "job name training_folder type device performance_log_every trigger_word meta"
# ostris/ai-toolkit 086b663b, toolkit/config_modules.py, by its classes' names in a job's file
_SAVE = "save_every dtype max_step_saves_to_keep save_format push_to_hub hf_repo_id hf_private"
_LOGGING = "log_every verbose use_wandb use_ui_logger project_name run_name"
_NETWORK = """
    type rank linear conv alpha linear_alpha conv_alpha dropout network_kwargs lorm transformer_only lokr_full_rank
    lokr_factor old_lokr_format split_multistage_loras layer_offloading pretrained_lora_path all_layers"""
_DATASETS = """
    batch_size type folder_path dataset_path default_caption trigger_word diff_output_preservation
    diff_output_preservation_class random_triggers random_triggers_max caption_ext random_scale random_crop resolution
    scale buckets bucket_tolerance is_reg prior_reg network_weight token_dropout_rate shuffle_tokens
    caption_dropout_rate keep_tokens flip_x flip_y augments control_path control_from_same_folder
    num_controls_from_same_folder control_path_1 control_path_2 control_path_3 control_transparent_color inpaint_path
    full_size_control_images alpha_mask mask_path unconditional_path invert_mask mask_min_value poi use_short_captions
    num_repeats cache_latents cache_latents_to_disk cache_tensors_to_disk cache_clip_vision_to_disk
    cache_text_embeddings load_image_when_caching_latents standardize_images augmentations shuffle_augmentations
    caption_type guidance_type clip_image_path clip_image_from_same_folder clip_image_augmentations
    clip_image_shuffle_augmentations replacements loss_multiplier num_workers prefetch_factor pin_memory
    cache_latents_num_workers extra_values square_crop replay_transforms num_frames shrink_video_to_frames fps
    auto_frame_count trim_auto_frame_count_tail debug controls fast_image_size do_i2v do_audio audio_preserve_pitch
    audio_normalize"""
_TRAIN = """
    noise_scheduler content_or_style steps lr unet_lr text_encoder_lr refiner_lr embedding_lr adapter_lr optimizer
    optimizer_params lr_scheduler lr_scheduler_params min_denoising_steps max_denoising_steps batch_size dtype xformers
    sdp attention_backend train_unet train_text_encoder train_refiner train_turbo show_turbo_outputs min_snr_gamma
    snr_gamma learnable_snr_gos noise_offset skip_first_sample force_first_sample gradient_checkpointing weight_jitter
    merge_network_on_save merge_network_on_save_strength max_grad_norm start_step free_u adapter_assist_name_or_path
    adapter_assist_type noise_multiplier target_noise_multiplier random_noise_multiplier do_signal_correction_noise
    do_batch_noise_correction batch_noise_correction_scale do_signal_amplification signal_amplification_strength
    signal_correction_noise_scale random_noise_shift img_multiplier noisy_latent_multiplier negative_prompt
    max_negative_prompts reg_weight num_train_timesteps adaptive_scaling_factor prompt_dropout_prob match_noise_norm
    gradient_accumulation_steps gradient_accumulation short_and_long_captions short_and_long_captions_encoder_split
    single_item_batching match_adapter_assist match_adapter_chance loss_target inverted_mask_prior
    inverted_mask_prior_multiplier diff_output_preservation diff_output_preservation_multiplier
    diff_output_preservation_class blank_prompt_preservation blank_prompt_preservation_multiplier standardize_images
    dynamic_noise_offset do_cfg do_random_cfg cfg_scale max_cfg_scale cfg_rescale correct_pred_norm
    correct_pred_norm_multiplier loss_type t0_loss_target t0_velocity_equiv_weight do_fft_loss
    do_fft_velocity_equiv_weight pred_scaler prompt_saturation_chance do_prior_divergence ema_config target_norm_std
    target_norm_std_value timestep_type first_timestep_chance next_sample_timesteps linear_timesteps linear_timesteps2
    disable_sampling unload_text_encoder cache_text_embeddings do_paramiter_swapping paramiter_swapping_factor
    bypass_guidance_embedding latent_feature_extractor_path latent_feature_loss_weight diffusion_feature_extractor_path
    diffusion_feature_extractor_weight optimal_noise_pairing_samples force_consistent_noise blended_blur_noise
    do_guidance_loss guidance_loss_target do_guidance_loss_cfg_zero guidance_loss_schedule unconditional_prompt
    do_differential_guidance differential_guidance_scale switch_boundary_every do_blank_stabilization
    audio_loss_multiplier max_loss_debug max_loss validation_config ema_config.use_ema ema_config.ema_decay
    ema_config.use_feedback ema_config.feedback_rate ema_config.param_multiplier validation_config.validation_items
    validation_config.resolution validation_config.validate_every_n_steps validation_config.validation_sigmas"""
_MODEL = """
    name_or_path is_v2 is_xl is_pixart is_pixart_sigma is_auraflow is_v3 is_flux is_lumina2 use_flux_cfg is_ssd is_vega
    is_v_pred dtype vae_path refiner_name_or_path refiner_start_at lora_path assistant_lora_path inference_lora_path
    unconditional_lora_path latent_space_version use_text_encoder_1 use_text_encoder_2 experimental_xl
    text_encoder_bits unet_path unet_sample_size vae_device vae_dtype te_device te_dtype quantize quantize_te qtype
    qtype_te low_vram attn_masking ignore_if_contains only_if_contains quantize_kwargs split_model_over_gpus
    split_model_other_module_param_count_scale te_name_or_path arch auto_memory layer_offloading
    layer_offloading_transformer_percent layer_offloading_text_encoder_percent extras_name_or_path
    accuracy_recovery_adapter compile block_compile compile_mode compile_fullgraph compile_dynamic cache_size_limit
    model_kwargs model_paths in_context"""
_SAMPLE = """
    sampler sample_every sample_start_step width height neg seed walk_seed guidance_scale sample_steps
    network_multiplier guidance_rescale format adapter_conditioning_scale refiner_start_at extra_values num_frames fps
    duration prompts samples do_cfg_norm samples.prompt samples.ctrl_img samples.ctrl_idx samples.ctrl_img_1
    samples.ctrl_img_2 samples.ctrl_img_3"""
_SECTIONS = {
    "job": _JOB,
    "save": _SAVE,
    "logging": _LOGGING,
    "network": _NETWORK,
    "datasets": _DATASETS,
    "train": _TRAIN,
    "model": _MODEL,
    "sample": _SAMPLE,
}
AI_TOOLKIT = [f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split()]

# kohya-ss/musubi-tuner 00dd2f74, src/musubi_tuner/training/parser_common.py; two of block swap from docs/krea2.md
# (14403b6c), then what the scripts of Wan, FLUX.1 Kontext, FLUX.2, Qwen-Image, Z-Image and Krea 2 add
MUSUBI = _words("""
    config_file dataset_config sdpa flash_attn sage_attn xformers flash3 split_attn compile compile_backend
    compile_mode compile_dynamic compile_fullgraph compile_cache_size_limit cuda_allow_tf32 cuda_cudnn_benchmark
    dynamo_backend dynamo_mode dynamo_fullgraph dynamo_dynamic max_train_steps max_train_epochs
    max_data_loader_n_workers persistent_data_loader_workers seed gradient_checkpointing
    gradient_checkpointing_cpu_offload gradient_accumulation_steps mixed_precision logging_dir log_with log_prefix
    log_tracker_name wandb_run_name log_tracker_config wandb_api_key log_config ddp_timeout ddp_gradient_as_bucket_view
    ddp_static_graph sample_every_n_steps sample_at_first sample_every_n_epochs sample_prompts optimizer_type
    optimizer_args learning_rate max_grad_norm lr_scheduler lr_warmup_steps lr_decay_steps lr_scheduler_num_cycles
    lr_scheduler_power lr_scheduler_timescale lr_scheduler_min_lr_ratio lr_scheduler_type lr_scheduler_args fp8_base
    blocks_to_swap use_pinned_memory_for_block_swap block_swap_h2d_only block_swap_ring_size img_in_txt_in_offloading
    disable_numpy_memmap guidance_scale timestep_sampling discrete_flow_shift sigmoid_scale weighting_scheme logit_mean
    logit_std mode_scale min_timestep max_timestep preserve_distribution_shape num_timestep_buckets show_timesteps
    no_metadata network_weights network_module network_dim network_alpha network_dropout network_args training_comment
    dim_from_weights scale_weight_norms base_weights base_weights_multiplier output_dir output_name resume
    save_every_n_epochs save_every_n_steps save_last_n_epochs save_last_n_epochs_state save_last_n_steps
    save_last_n_steps_state save_state save_state_on_train_end metadata_title metadata_author metadata_description
    metadata_license metadata_tags metadata_reso metadata_arch huggingface_repo_id huggingface_repo_type
    huggingface_path_in_repo huggingface_token huggingface_repo_visibility save_state_to_huggingface
    resume_from_huggingface async_upload dit vae vae_dtype
    task fp8_scaled t5 fp8_t5 clip vae_cache_cpu one_frame force_v2_1_time_embedding dit_high_noise timestep_boundary
    offload_inactive_dit text_encoder text_encoder1 text_encoder2 fp8_text_encoder tokenizer_max_length model_version
    fp8_vl num_layers edit edit_plus fp8_llm turbo_dit turbo_dit_cache""")
# Of a line of the file of prompts, docs/sampling_during_training.md at fd06da82
MUSUBI_PROMPTS = _words("w h f d s g fs i cn n l ci")
# Of a data set, dataset/config_utils.py at 1a1f7246, and of network_args, docs/advanced_config.md
MUSUBI_KEYS = _words("""
    caption_extension batch_size num_repeats resolution enable_bucket bucket_no_upscale skip_corrupted_cache
    image_directory image_jsonl_file cache_directory control_directory multiple_target fp_latent_window_size
    fp_1f_clean_indices fp_1f_target_index fp_1f_no_post no_resize_control control_resolution video_directory
    video_jsonl_file target_frames frame_extraction frame_stride frame_sample max_frames source_fps
    loraplus_lr_ratio include_patterns exclude_patterns rank_dropout module_dropout verbose""")

# bghira/SimpleTuner 289746d1, documentation/OPTIONS.md: its headings and its list of all options
_CLASSES = {
    "ltx2_": """
    intrinsic_conditioning first_frame_conditioning_probability prefix_conditioning_probability
    prefix_conditioning_frames suffix_conditioning_probability suffix_conditioning_frames
    mask_conditioning_probability reference_spatial_scale_factor reference_temporal_scale_factor""",
    "nsfw_check_": """
    models min_votes backend_types sample_types video_frame_count video_frame_selection video_min_flagged_frames""",
    "sdnq_": """
    weights_dtype quantized_matmul_dtype group_size use_quantized_matmul compile_mode use_static_quantization
    use_stochastic_rounding dequantize_fp32 use_svd svd_rank svd_steps use_hadamard hadamard_group_size
    modules_to_not_convert modules_to_not_use_matmul modules_dtype_dict modules_quant_config""",
    "ramtorch_": """
    target_modules text_encoder vae controlnet transformer_percent text_encoder_percent disable_sync_hooks
    disable_extensions""",
    "scheduled_sampling_": """
    max_step_offset strategy probability prob_start prob_end ramp_steps start_step ramp_shape sampler order reflexflow
    reflexflow_alpha reflexflow_beta1 reflexflow_beta2""",
    "crepa_": """
    enabled block_index lambda adjacent_distance adjacent_tau cumulative_neighbors normalize_neighbour_sum
    normalize_by_frames spatial_align model encoder_frames_batch_size use_backbone_features feature_source self_flow
    self_flow_mask_ratio teacher_block_index encoder_image_size scheduler warmup_steps decay_steps lambda_end power
    cutoff_step similarity_threshold similarity_ema_decay threshold_mode""",
    "urepa_": """
    enabled lambda manifold_weight model encoder_image_size use_tae scheduler warmup_steps decay_steps lambda_end power
    cutoff_step similarity_threshold similarity_ema_decay threshold_mode""",
    "layersync_": "enabled student_block teacher_block lambda",
}
SIMPLETUNER_CLASSES = [f"{start}{suffix}" for start, names in _CLASSES.items() for suffix in names.split()]
SIMPLETUNER = [
    *SIMPLETUNER_CLASSES,
    *_words("""
    model_type model_family lora_format fuse_qkv_projections offload_during_startup offload_during_save
    delete_model_after_load text_embed_full_cache trust_remote_code enable_group_offload group_offload_type
    group_offload_blocks_per_group group_offload_use_stream group_offload_to_disk_path musubi_blocks_to_swap
    musubi_block_swap_device ramtorch pretrained_model_name_or_path pretrained_transformer_model_name_or_path
    pretrained_t5_model_name_or_path pretrained_gemma_model_name_or_path max_grounding_entities
    pretrained_grounding_model_name_or_path custom_text_encoder_intermediary_layers gradient_checkpointing
    gradient_checkpointing_interval gradient_checkpointing_backend refiner_training quantize_via base_model_precision
    quantization_config dynamo_backend dynamo_mode dynamo_fullgraph dynamo_dynamic dynamo_use_regional_compilation
    attention_mechanism sageattention_usage sla_config push_to_hub push_to_hub_background push_checkpoints_to_hub
    webhook_config publishing_config hub_model_id modelspec_comment disable_benchmark data_backend_config
    override_dataset_config data_backend_sampling vae_cache_scan_behaviour enable_nsfw_check delete_nsfw_images
    dataloader_prefetch dataloader_prefetch_qlen compress_disk_cache resolution_type resolution validation_resolution
    validation_method validation_external_script validation_external_background post_upload_script
    post_checkpoint_script validation_adapter_path validation_adapter_name validation_adapter_strength
    validation_adapter_mode validation_adapter_config validation_preview validation_preview_steps evaluation_type
    eval_loss_disable validation_using_datasets eval_dataset_id caption_strategy conditioning_multidataset_sampling
    krea2_reference_latents validation_ltx2_video_conditioning num_train_epochs max_train_steps ignore_final_epochs
    learning_rate lr_scheduler optimizer optimizer_config train_batch_size gradient_accumulation_steps
    allow_dataset_oversubscription use_ema ema_device ema_cpu_only ema_foreach_disable ema_update_interval ema_decay
    snr_gamma use_soft_min_snr diff2flow_enabled diff2flow_loss checkpoint_step_interval checkpointing_steps
    checkpoint_epoch_interval resume_from_checkpoint delete_invalid_checkpoints disk_low_threshold disk_low_action
    disk_low_script logging_dir report_to
    model_flavour controlnet output_dir seed prediction_type pretrained_vae_model_name_or_path vae_dtype
    vae_cache_ondemand vae_cache_disable accelerator_cache_clear_interval aspect_bucket_rounding
    text_encoder_1_precision text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision control
    controlnet_custom_config controlnet_model_name_or_path tread_config pretrained_transformer_subfolder
    pretrained_unet_model_name_or_path pretrained_unet_subfolder revision variant base_model_default_dtype
    unet_attention_slice lr_warmup_steps checkpoints_total_limit train_text_encoder text_encoder_lr lr_num_cycles
    lr_power lora_rank lora_alpha lora_type lora_dropout lora_init_type peft_lora_mode peft_lora_target_modules
    singlora_ramp_up_steps slider_lora_target init_lora lycoris_config init_lokr_norm flux_lora_target use_dora
    instance_prompt parquet_caption_column parquet_filename_column ignore_missing_files vae_enable_slicing
    vae_enable_tiling vae_enable_patch_conv vae_batch_size caption_dropout_probability tokenizer_max_length
    validation_step_interval validation_steps validation_epoch_interval validation_prompt num_validation_images
    num_eval_images eval_steps_interval eval_epoch_interval eval_timesteps eval_dataset_pooling
    pretrained_evaluation_model_name_or_path validation_guidance validation_num_inference_steps validation_on_startup
    validation_torch_compile validation_guidance_real validation_no_cfg_until_timestep validation_negative_prompt
    validation_randomize validation_seed validation_disable validation_prompt_library user_prompt_library
    validation_stitch_input_location validation_guidance_rescale validation_disable_unconditional
    validation_guidance_skip_layers validation_guidance_skip_layers_start validation_guidance_skip_layers_stop
    validation_guidance_skip_scale validation_lycoris_strength validation_noise_scheduler validation_num_video_frames
    validation_audio_only validation_seed_source i_know_what_i_am_doing flow_sigmoid_scale flux_fast_schedule
    flow_use_uniform_schedule flow_use_beta_schedule flow_beta_schedule_alpha flow_beta_schedule_beta
    flow_schedule_shift flow_schedule_auto_shift flow_custom_timesteps flow_timesteps_mode flux_guidance_mode
    flux_attention_masked_training flux_guidance_value flux_guidance_min flux_guidance_max t5_padding
    sd3_clip_uncond_behaviour sd3_t5_uncond_behaviour soft_min_snr_sigma_data mixed_precision disable_tf32
    set_grads_to_none noise_offset noise_offset_probability input_perturbation input_perturbation_steps lr_end lr_scale
    lr_scale_sqrt freeze_encoder_before freeze_encoder_after freeze_encoder_strategy layer_freeze_strategy
    fully_unload_text_encoder save_text_encoder text_encoder_limit prepend_instance_prompt only_instance_prompt
    data_aesthetic_score delete_unwanted_images delete_problematic_images disable_bucket_pruning
    disable_segmented_timestep_sampling preserve_data_backend_cache cache_dir cache_dir_text cache_dir_vae
    aspect_bucket_disable_rebuild keep_vae_loaded skip_file_discovery image_processing_batch_size write_batch_size
    read_batch_size enable_multiprocessing max_workers aws_max_pool_connections torch_num_threads
    aspect_bucket_worker_count aspect_bucket_alignment minimum_image_size maximum_image_size target_downsample_size
    max_upscale_threshold metadata_update_interval debug_aspect_buckets debug_dataset_loader print_filenames
    print_sampler_statistics timestep_bias_strategy timestep_bias_begin timestep_bias_end timestep_bias_multiplier
    timestep_bias_portion training_scheduler_timestep_spacing inference_scheduler_timestep_spacing loss_type
    huber_schedule huber_c masked_loss_probability hidream_use_load_balancing_loss hidream_load_balancing_loss_weight
    adam_beta1 adam_beta2 optimizer_beta1 optimizer_beta2 optimizer_cpu_offload_method gradient_precision
    adam_weight_decay adam_epsilon prodigy_steps max_grad_norm grad_clip_method optimizer_offload_gradients
    fuse_optimizer optimizer_release_gradients model_card_private model_card_safe_for_work model_card_note
    checkpointing_rolling_steps checkpointing_use_tempdir checkpoints_rolling_total_limit tracker_run_name
    tracker_project_name tracker_image_layout enable_watermark framerate seed_for_each_device snr_weight
    rescale_betas_zero_snr webhook_reporting_interval distillation_method distillation_config ema_validation local_rank
    ltx_train_mode ltx_i2v_prob ltx_partial_noise_fraction ltx_protect_first_frame offload_param_path offset_noise
    quantize_activations refiner_training_invert_schedule refiner_training_strength sdxl_refiner_uses_full_range
    sana_complex_human_instruction enable_model_cpu_offload"""),
]
# Of a data set, documentation/DATALOADER.md at 289746d1
SIMPLETUNER_KEYS = [
    f"dataset.{key}"
    for key in _words("""
    id disabled dataset_type default cache_dir write_batch_size text_embeds image_embeds conditioning_image_embeds
    cache_dir_conditioning_image_embeds conditioning_image_embed_batch_size audio type conditioning_type
    source_dataset_id conditioning_data instance_data_dir aws_data_prefix caption_strategy disable_multiline_split
    caption_shuffle metadata_backend metadata_update_interval crop crop_style crop_aspect crop_aspect_buckets
    resolution
    resolution_type minimum_image_size minimum_aspect_ratio maximum_aspect_ratio conditioning video.num_frames
    video.min_frames video.max_frames video.is_i2v video.bucket_strategy video.frame_interval maximum_image_size
    target_downsample_size max_upscale_threshold prepend_instance_prompt only_instance_prompt instance_prompt
    timestep_sampling_offset repeats probability max_num_samples start_epoch start_step end_epoch end_step
    is_regularisation_data delete_unwanted_images delete_problematic_images delete_nsfw_images slider_strength
    vae_cache_clear_each_epoch skip_file_discovery preserve_data_backend_cache hash_filenames grounding
    caption_filter_list cache_dir_vae parquet dataset_name caption_column image_column webshart csv_file
    csv_caption_column csv_cache_dir""")
]
