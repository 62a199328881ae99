"""The chat task: conversations, answers and validation."""
