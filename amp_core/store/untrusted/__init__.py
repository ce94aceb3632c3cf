"""Runs from strangers: bounded before they are decoded (`limits`, `zip_directory`), decoded first in a process of its
own (`sandbox`, `sandbox_process`), and checked row by row (`validate`).
"""
