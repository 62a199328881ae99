"""Conversations about images and videos: read, sampled, rendered to tokens."""
