"""A function of torch as Inductor compiles it: its kernels, their source, and labels of where each comes from."""
