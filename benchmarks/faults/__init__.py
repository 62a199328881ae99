"""The fault-injection suite: each fault, and the diagnosis and action it must lead to."""
