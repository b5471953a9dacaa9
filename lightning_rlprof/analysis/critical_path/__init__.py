"""The step as a graph of dependencies: critical path, slack, replay."""
