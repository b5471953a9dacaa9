"""The method of TorchRL's collectors that the door to PyTorch covers."""


class BaseCollector:
    """A collector."""

    def __iter__(self):
        """Return batches of frames."""
        yield from self.iterator()
