"""Chrome-trace JSON as a bounded stream of events."""
