"""The roads of the first example, vector_add: two builds, and the ways to turn a built function into an operator."""
