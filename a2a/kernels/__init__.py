"""The compiled side: the C library of the CPU kernels (`cpu`). Knows nothing of torch or of collectives' semantics."""
