"""A run on disk: records of spans, the run directory, and its upload."""
