"""What a coding assistant may ask of recorded runs, over the Model Context Protocol. It only reads.

answers (plain documents) -> bounded (at most 20 kB each, marked as data) -> server (one tool per question)
"""
