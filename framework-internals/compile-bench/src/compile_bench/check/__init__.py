"""A target against a budget, a lock file, another run's caches, or another installation of torch."""
