"""Conversations about images and videos: reading, frame sampling, and rendering to tokens."""
