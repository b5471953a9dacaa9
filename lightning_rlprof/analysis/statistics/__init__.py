"""Statistics on plain numpy arrays: medians, tests, time series."""
