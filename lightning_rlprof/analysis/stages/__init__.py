"""Where the time of a step goes, by stage."""
