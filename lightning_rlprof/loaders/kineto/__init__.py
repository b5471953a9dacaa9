"""torch.profiler traces (Kineto)."""
