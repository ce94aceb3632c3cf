"""The subcommands of `ampscope`, one module each.

`add(subparsers)` declares a command; `run(arguments)` executes it and returns its exit code.
"""
