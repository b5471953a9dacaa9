"""Analyses of samples: their fates, staleness, long tail, balance, and the way of one of them."""
