"""Step time after a change, estimated from the step graph."""
