"""Which rank a hanging run waits for, and the line at which it is."""
