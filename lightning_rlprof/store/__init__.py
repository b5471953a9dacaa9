"""A run's tables kept as Parquet beside the run, and asked in SQL; nothing here can be changed."""
