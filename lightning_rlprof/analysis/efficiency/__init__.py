"""FLOPs against the device's peak: throughput, MFU, matmuls."""
