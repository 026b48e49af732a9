"""Networks of projects that import flex_gemm."""
