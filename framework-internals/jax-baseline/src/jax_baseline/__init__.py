"""The baseline's training loop in JAX, compared step by step."""
