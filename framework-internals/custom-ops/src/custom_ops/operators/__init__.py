"""The operators: a typed function for each, its argument checks, and what is registered with torch."""
