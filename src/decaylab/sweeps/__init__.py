"""Many runs: what is left of them, in which order, and who makes them."""
