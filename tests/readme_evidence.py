"""What shows each sentence and table row of the README: tests, files of tests, or commands of benchmarks.

A sentence or row is named by its beginning, without Markdown's emphasis. `tests/docs/test_readme.py` fails if one has
no entry here, or if an entry names a test or module that does not exist.
"""

_READS_BLOCKS = "tests/docs/test_code_blocks.py::test_every_block_runs"
_README = "tests/docs/test_readme.py"
_MEMORY = f"{_README}::test_the_memory_of_each_model_is_that_of_its_page"
_COMPARISON = f"{_README}::test_the_comparison_says_what_the_runs_showed"
_LOOKED_UP = (
    "benchmarks.trainers",
    f"{_README}::test_each_cell_about_another_trainer_is_looked_up_in_its_repository",
)
_FIGURES = f"{_README}::test_every_measured_figure_is_on_the_page_of_its_benchmark"
_LINKS = "tests/docs/test_site.py"
_RANKS = "tests/recipes/test_distributed.py"

EVIDENCE: dict[str, tuple[str, ...]] = {
    "Loss is NaN?": (f"{_README}::test_the_symptom_comes_first_and_the_tables_after_one_screen",),
    "Samples are black?": (f"{_README}::test_the_symptom_comes_first_and_the_tables_after_one_screen",),
    "One broken clip": ("benchmarks.world.diffusers_script", "benchmarks.loops.__main__", _COMPARISON),
    "`dit-lora` fine-tunes": (
        "tests/recipes/test_families.py",
        "tests/recipes/test_chat.py",
        f"{_RANKS}::test_a_nan_in_one_cached_latent_stops_all_ranks_before_it_touches_a_weight",
    ),
    "It reads the cause": (_READS_BLOCKS, "benchmarks.faults.__main__"),
    "If the clip was bad at its first use": (
        "tests/recipes/test_recovery.py::test_a_nan_in_one_cached_latent_ends_as_a_run_on_a_folder_without_the_clip",
    ),
    "It loads without this package": (
        "tests/recipes/test_lora.py::test_a_plain_diffusers_script_reproduces_the_trained_transformer",
    ),
    "If you like your trainer": ("tests/plugin/test_script.py",),
    "You need": (f"{_README}::test_the_requirements_are_those_of_the_package",),
    "Status: alpha": (f"{_README}::test_the_licence_and_the_status_are_those_of_the_package",),
    "In a clone": (
        "tests/packaging/test_wheel.py::test_a_first_hour_with_the_wheel_alone",
        "benchmarks.world.settings",
    ),
    "GiB of GPU memory": (_MEMORY, "tests/docs/test_models_page.py"),
    "| `cogvideox/5b_t2v`": (_MEMORY,),
    "| `wan/2.1_t2v_1.3b`": (_MEMORY,),
    "| `wan/2.1_t2v_14b`": (_MEMORY,),
    "| `ltx2/2.3_t2v`": (_MEMORY,),
    "| `flux/dev`": (_MEMORY,),
    "| `flux2/klein_base_9b`": (_MEMORY,),
    "| `qwen_image/base`": (_MEMORY,),
    "| `z_image/base`": (_MEMORY,),
    "| `krea2/raw`": (_MEMORY,),
    "| `sd3/3.5_large`": (_MEMORY,),
    "| `chat/qwen`": (_MEMORY,),
    "Also Anima": (f"{_README}::test_every_model_is_in_a_recipe_or_on_the_pages_of_models",),
    "On [one H200]": (_FIGURES,),
    "As of August 2026": _LOOKED_UP,
    "The first row": (_COMPARISON, *_LOOKED_UP),
    "| NaN or Inf": (_COMPARISON, "benchmarks.faults.__main__"),
    "| models |": (*_LOOKED_UP, f"{_README}::test_every_model_is_in_a_recipe_or_on_the_pages_of_models"),
    "| interface |": (*_LOOKED_UP, "tests/dit_lora/studio"),
    "| beyond Linux": (*_LOOKED_UP, "tests/dit_lora/environment/test_operating_system.py"),
    "| licence;": (*_LOOKED_UP, f"{_README}::test_the_licence_and_the_status_are_those_of_the_package"),
    "Move from": ("tests/docs/test_migration.py",),
    "Put your clips": (_READS_BLOCKS,),
    "Clips are a folder": (
        "tests/dit_lora/data/sources/test_webdataset.py",
        "tests/dit_lora/data/sources/test_hf_datasets.py",
        "tests/dit_lora/data/sources/test_caption_table.py",
    ),
    "Ctrl-C saves": (
        "tests/dit_lora/cli/test_train.py::test_ctrl_c_in_a_terminal_saves_and_says_how_to_continue",
        "tests/recipes/test_lora.py::test_an_interrupt_saves_and_the_resumed_run_equals_the_undisturbed_one",
    ),
    "The adapter works in plain Diffusers": (
        "tests/recipes/test_lora.py::test_a_plain_diffusers_script_reproduces_the_trained_transformer",
    ),
    "`dit-lora guard train.py ARGS`": ("tests/plugin/test_script.py",),
    "In a loop with Accelerate": (
        _READS_BLOCKS,
        "tests/plugin/test_trainer_script.py",
        "tests/plugin/test_lightning.py",
    ),
    "[Fused kernels]": (_READS_BLOCKS, "tests/dit_lora/training/optim/test_build.py"),
    "| repeats itself": (
        "benchmarks.kill_nine",
        "benchmarks.gpu_recovery",
        "tests/recipes/test_lora.py::test_kill_9_at_any_moment_then_resume_equals_the_undisturbed_run",
    ),
    "| checks data": (
        "tests/dit_lora/data/audit",
        "tests/dit_lora/data/cache",
        "tests/recipes/test_data.py::test_a_run_over_buckets_windows_and_sources_resumes_bit_for_bit",
        "tests/dit_lora/training/tasks/diffusion/test_references.py",
    ),
    "| scales": (
        f"{_RANKS}::test_two_ranks_with_half_the_batch_each_train_alike",
        "tests/recipes/test_levers.py::test_two_ranks_train_as_one_process_does",
        "tests/dit_lora/training/distributed",
        "tests/recipes/test_quantize.py",
        "tests/recipes/test_fp8.py",
        "tests/recipes/test_optimizers.py",
    ),
    "| adapts": (f"{_README}::test_adapters_and_trackers_are_those_of_recipes", "tests/recipes/test_continue.py"),
    "| reports": ("tests/dit_lora/report", "tests/dit_lora/training/trackers", "tests/dit_lora/hub/test_card.py"),
    "| measured": ("benchmarks.machine",),
    "| whole step over a bare loop": ("benchmarks.overhead", _FIGURES),
    "| a small DiT from scratch": ("benchmarks.digits", _FIGURES),
    "| kept for backward": ("benchmarks.activations", _FIGURES),
    "| cached samples read again": ("benchmarks.cache", "benchmarks.decode", _FIGURES),
    "Start with": (_LINKS, "tests/docs/test_notebook.py"),
    "[How the guard works]": (_LINKS,),
    "Apache-2.0.": (f"{_README}::test_the_licence_and_the_status_are_those_of_the_package",),
}
