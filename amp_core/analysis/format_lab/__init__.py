"""Numbers rounded to a format, exactly (`rounding`), and what is often said of formats, computed (`myths`)."""
