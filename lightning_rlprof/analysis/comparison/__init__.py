"""Two runs or two traces, compared at equal work."""
