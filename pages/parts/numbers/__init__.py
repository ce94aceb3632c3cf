"""Ranges of numbers: tensors over steps, one tensor, numbers in the formats, what other scales would do."""
