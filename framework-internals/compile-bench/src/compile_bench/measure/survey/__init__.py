"""What keeps a target out of graphs: traced in training and in inference, behind skipped frames too."""
