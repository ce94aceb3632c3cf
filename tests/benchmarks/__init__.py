"""Benchmarks: scripts that print one markdown table each, listed in README.md. pytest collects none of them."""
