"""What a step consists of: the ground of every other analysis."""
