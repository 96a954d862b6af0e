"""The GPT as a pure function of its parameters, its training step and loop, and what surrounds a run."""
