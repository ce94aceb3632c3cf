"""Any number of tensor statistics in bounded memory: segments -> sealed_tensors (parts of one) -> extract -> Run."""
