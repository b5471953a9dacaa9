"""torch.profiler as a recorder: its window, event budget and export."""
