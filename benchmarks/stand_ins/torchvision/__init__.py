"""Stand-in for torchvision."""
