"""curvature."""
