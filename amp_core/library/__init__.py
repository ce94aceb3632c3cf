"""Labels and muted findings of runs, kept in sidecar files, and permissions of a served app."""
