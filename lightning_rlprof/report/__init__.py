"""Runs and tables drawn for people and viewers: terminal text, one HTML file, Perfetto."""
