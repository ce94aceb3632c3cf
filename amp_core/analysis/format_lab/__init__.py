"""Exact rounding of numbers to a format (`rounding`), and myths about formats, checked by computing (`myths`)."""
