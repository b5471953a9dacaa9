"""The command ``rlprof``: the only room that puts reading, drawing and the demo together."""
