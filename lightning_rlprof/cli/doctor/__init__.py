"""Look at what this machine can record, what is missing or broken, and how to get it."""
