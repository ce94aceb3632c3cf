"""The library: which runs there are, what comes in, a row for each, and what can be done with them."""
