"""verl's profiler keys, read as ours."""
