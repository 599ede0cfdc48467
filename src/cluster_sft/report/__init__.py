"""Parts of stage report: points and results, comparisons, tables, figures, the page."""
