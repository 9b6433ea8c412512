"""What policies are made of: shared decisions, predictions and state. One policy is one file in the folder above."""
