"""Collectives, weight synchronization and links between ranks."""
