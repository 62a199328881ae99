"""Versions and known-bad combinations, the launch, and what is fetched or loaded from outside."""
