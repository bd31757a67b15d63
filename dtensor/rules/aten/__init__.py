"""Rules of the aten operators: one file per family of operators, declarations and the kernels that only they use."""
