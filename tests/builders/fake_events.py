"""A fake of a device's events: a stream that passes them only when told to."""


class FakeStream:
    """Keeps the events in the order in which they were recorded; time is in milliseconds."""

    def __init__(self):
        self.made = 0
        self.passed: dict[object, float] = {}
        self.queue: list[object] = []
        self.capturing = False

    def event(self):
        self.made += 1
        return FakeEvent(self)

    def pass_next(self, milliseconds):
        """Let the device pass the oldest event at this time."""
        self.passed[self.queue.pop(0)] = milliseconds


class FakeEvent:
    """Strict as torch.Event: no time before it was recorded and passed."""

    def __init__(self, stream):
        self.stream = stream

    def record(self):
        assert not self.stream.capturing, "an event would become part of the graph"
        self.stream.passed.pop(self, None)
        self.stream.queue.append(self)

    def query(self):
        return self in self.stream.passed

    def synchronize(self):
        while not self.query():
            self.stream.pass_next(0.0)

    def elapsed_time(self, end):
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return self.stream.passed[end] - self.stream.passed[self]
