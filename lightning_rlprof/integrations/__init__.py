"""Doors into training frameworks, one module or folder each."""
