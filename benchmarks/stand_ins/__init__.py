"""Stand-ins for packages that Diffusers' `train_cogvideox_lora.py` imports: what it needs of them for small clips.

They take the place of packages that are not installed (`benchmarks.world.diffusers_script`).
"""
