"""What the operating system and the interpreter give: files, paths, URLs, subprocesses."""
