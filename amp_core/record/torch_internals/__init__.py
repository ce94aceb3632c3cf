"""Access to torch's internals: patched functions, compiled code, CUDA graph captures, dispatch modes.

All hooks and patches are removed when watching ends. Copies and pickles of watched objects do not contain them.
"""
