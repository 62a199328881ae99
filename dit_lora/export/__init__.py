"""Adapters in other programs' formats, and merged into their base."""
