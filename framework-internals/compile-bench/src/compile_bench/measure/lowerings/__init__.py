"""The choice between an operator's formula and its kernel, measured in the whole compiled step."""
