"""Operators and modules: host calls as a tree, device time charged to each."""
