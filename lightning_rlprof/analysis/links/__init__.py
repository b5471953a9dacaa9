"""Links between ranks: how fast each moves data, and which one is slow."""
