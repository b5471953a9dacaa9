"""Doors into other frameworks, one file each: what is a step, and what is which stage."""
