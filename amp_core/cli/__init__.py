"""The subcommands of `ampscope`, one module each.

`add(subparsers)` declares a command, `run(arguments)` carries it out and gives its exit code.
"""
