"""What a training step needs beside its model: the loss and the optimizer."""
