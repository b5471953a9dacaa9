"""What a transformer is made of, and what it costs: parameters, FLOPs, KV cache."""
