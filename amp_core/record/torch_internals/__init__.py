"""Everything that touches torch's own machinery: patched functions, compiled code, CUDA graph captures, dispatch modes.

Whatever is installed here is removed again, and copies and pickles of watched objects do not carry it.
"""
