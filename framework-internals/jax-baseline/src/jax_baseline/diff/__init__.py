"""What XLA and Inductor make of the same computation, side by side."""
