"""Graph breaks of a target: found, their cost measured, and fixed where a fix can be verified."""
