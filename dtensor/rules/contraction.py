"""Contractions: products of matrices and their sums with a bias."""

from __future__ import annotations

from .verbs import einsum

einsum("mm", "m k, k n -> m n")
einsum("bmm", "b m k, b k n -> b m n")
einsum("mv", "m k, k -> m")
einsum("dot vdot", "k, k ->")
einsum("ger outer", "m, n -> m n")
einsum("addmm", "+m n, m k, k n -> m n")
einsum("baddbmm", "+b m n, b m k, b k n -> b m n")
einsum("addbmm", "+m n, b m k, b k n -> m n")
einsum("addmv", "+m, m k, k -> m")
einsum("addr", "+m n, m, n -> m n")
