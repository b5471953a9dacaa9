"""Pure functions from the spans of a run to a table; `catalog` lists them all."""
