"""The pages of the app: one page, one question."""
