import os

# Deterministic cuBLAS, which must be asked for before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
