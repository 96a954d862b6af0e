"""One training step of the GPT, with the parts of every lens put in: what ``end_to_end.py`` measures and reports."""
