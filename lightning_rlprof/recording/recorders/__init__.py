"""Recorders: each mirrors a session into one device tool and knows none of the others."""
