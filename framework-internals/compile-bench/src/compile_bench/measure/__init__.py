"""Measurements of a target: steps, memory, accuracy, shapes, and counts of graphs and breaks."""
