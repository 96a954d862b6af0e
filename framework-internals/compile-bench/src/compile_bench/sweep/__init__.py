"""Every model over all modes of torch.compile."""
