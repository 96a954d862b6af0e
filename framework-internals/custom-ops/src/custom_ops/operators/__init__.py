"""The operators: a typed function each, and what is registered for them."""
