"""The guard of a run: set-up, preflight, recovery and what they write."""
