"""What decides whether CluSTER may be trusted on given data: formulas on arrays, and figures."""
