"""What a run comes to: findings, costs and gains, the report, what is taught, the tour through the samples."""
