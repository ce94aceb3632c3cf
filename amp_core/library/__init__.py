"""What people note beside runs (labels, muted findings), kept in sidecar files, and who may change what
(`permissions`)."""
