"""Report: the paper's tables and figures from records, as one HTML page, Markdown and CSV."""
