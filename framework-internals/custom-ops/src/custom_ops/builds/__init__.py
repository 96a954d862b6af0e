"""The builds of the operators: how each is compiled, which one is loaded, and ``custom-ops new``."""
