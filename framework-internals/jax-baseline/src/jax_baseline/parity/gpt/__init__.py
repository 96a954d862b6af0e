"""The GPT of this package beside that of torch_baseline: steps, planted mistakes, meshes, and runs to the end."""
