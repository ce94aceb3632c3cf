"""Number ranges: tensors over steps, one tensor, numbers in formats, other loss scales."""
