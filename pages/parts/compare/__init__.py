"""Comparing runs: text and tables, step costs, and live."""
