"""Injected faults with the verdict and the action that each must get: `dit-lora faults`."""
