"""torch.compile measured: what it costs, what it gives, what breaks the graph."""
