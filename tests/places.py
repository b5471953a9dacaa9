"""Where tests find the project, its benchmarks, and the real traces beside it."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
