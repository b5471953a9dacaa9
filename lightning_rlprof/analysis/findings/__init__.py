"""What to fix first: rules over all analyses, and data quality."""
