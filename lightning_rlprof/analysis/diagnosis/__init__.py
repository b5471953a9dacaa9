"""What is wrong with a run, by one registry of problems, and what to change about each."""
