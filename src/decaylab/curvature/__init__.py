"""Curvature: what layers see and send back, its Kronecker factors, and exact products."""
