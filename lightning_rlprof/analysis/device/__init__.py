"""Kernels, copies, idle time and launches of one device."""
