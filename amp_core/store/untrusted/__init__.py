"""Runs of unknown origin: bounded before they are decoded (`limits`, `zip_directory`), converted by a process that may
die of them (`converted_source` -> `sandbox` -> `sandbox_process`), and checked row by row (`validate`).
"""
