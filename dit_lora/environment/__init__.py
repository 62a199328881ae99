"""Package versions and known-bad combinations, launch checks, and loading of checkpoints and Hub files."""
