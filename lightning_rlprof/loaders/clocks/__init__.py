"""One common timeline for the clocks of many hosts."""
