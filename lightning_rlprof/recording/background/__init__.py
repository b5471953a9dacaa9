"""What the host, its container, this process and its device do while a session records."""
