"""What to record and capture: values and yes/no answers, never a file, a variable or a command."""
