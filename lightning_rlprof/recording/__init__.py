"""Record a training run: spans, captures and notes of one rank."""
