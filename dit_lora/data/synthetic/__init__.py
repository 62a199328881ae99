"""Generated clips and conversations for demos and tests."""
