"""Timing, limits, environment, results, reports and plots for every lens; neither torch nor jax is imported at module level."""
