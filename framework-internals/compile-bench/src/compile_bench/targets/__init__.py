"""What is compiled: a model with its arguments, from the zoo or from a file."""
