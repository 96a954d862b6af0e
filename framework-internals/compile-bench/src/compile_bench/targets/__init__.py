"""Targets: models with their arguments, from the zoo or from the user's code."""
