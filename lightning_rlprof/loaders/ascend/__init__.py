"""Captures of torch_npu.profiler: databases and text files, and the parser that writes them."""
