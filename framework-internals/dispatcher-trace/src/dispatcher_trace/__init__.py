"""The annotated walk of a call through PyTorch's dispatcher."""
