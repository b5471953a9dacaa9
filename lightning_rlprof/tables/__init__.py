"""Columns in memory, shared by loaders and analyses: tables, spans, kernels, intervals."""
