"""GPU-hours of the whole job, every second in one category."""
