"""Runs beside each other: in words and tables, their step costs, and live."""
