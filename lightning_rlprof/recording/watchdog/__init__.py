"""Notice that a rank makes no progress, and write down what it is doing."""
