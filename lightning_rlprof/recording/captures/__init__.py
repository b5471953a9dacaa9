"""Captures of a rank: when they open and close, and who may ask for one."""
