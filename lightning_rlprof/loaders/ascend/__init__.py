"""Ascend captures: databases and text files that torch_npu.profiler wrote."""
