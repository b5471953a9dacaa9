"""A run as a Chrome trace, for ui.perfetto.dev."""
