"""Which build of the kernels serves, how each is made and loaded, and the template of an operator package."""
