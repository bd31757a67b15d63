"""Rules of the aten operators: one file per family of operators. Larger algorithms are in ``rules/kernels``."""
