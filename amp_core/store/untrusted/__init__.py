"""Runs of unknown origin: bounded before they are decoded (`limits`, `zip_directory`), converted in a process that may
crash (`converted_source` -> `sandbox` -> `sandbox_process`), and checked row by row (`validate`).
"""
