"""Device and host memory: use, growth and phases."""
