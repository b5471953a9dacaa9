"""Runs and traces turned into caches once, many at a time, and opened from them ever after."""
