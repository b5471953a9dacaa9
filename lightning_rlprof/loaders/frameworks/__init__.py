"""What frameworks write of their own stages and samples: AReaL, slime, verl, rl-insight."""
