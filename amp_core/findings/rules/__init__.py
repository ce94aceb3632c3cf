"""The rules, each beside its guide entry, in one module per subject.

To add a rule, write a function in the module of its subject or in a new module, and put `@rule(Entry(…))` above it.
`amp_core.findings` imports every module of this package, so nothing else needs an edit. The entry's `order` ranks its
harm among the others, which `sorted((e.order, e.code) for e in GUIDE.values())` lists.
"""
