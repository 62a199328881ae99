"""The fault-injection suite: each fault, and the diagnosis and action it must lead to."""

# First: it keeps bitsandbytes, which PEFT imports, from warning about a kernel of the Hub that no run needs.
import dit_lora.families  # noqa: F401
