"""Tensors, ops and calls, as regions see them."""
