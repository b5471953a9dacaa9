"""The method of Tianshou's collectors that the door to PyTorch covers."""


class BaseCollector:
    """A collector."""

    def collect(self):
        """Collect a step's transitions."""
        return self._collect()
