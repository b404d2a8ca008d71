"""Many runs: which are left, in what order, and where they are trained."""
