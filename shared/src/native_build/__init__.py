"""Building and loading C++ and CUDA operators."""
