"""What must not break a training, lose what it wrote, or let a stranger's file do harm.

The tests here are the quick forms; each has a long form beside it, a script: `kills` and `fuzz`.
"""
