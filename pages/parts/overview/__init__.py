"""Parts of Overview: findings, costs and gains, the report, myths, the tour through the samples."""
