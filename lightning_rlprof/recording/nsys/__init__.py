"""Nsight Systems around a training: its command line and its report files."""
