"""The app as a server: attacks on it, many sessions at once, big runs, long runs."""
