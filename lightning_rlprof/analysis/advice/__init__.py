"""Advice as data: what of a run to change, by which setting, and what that is expected to bring."""
