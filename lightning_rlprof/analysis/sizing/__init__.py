"""Whether a training fits its devices, before it is started."""
