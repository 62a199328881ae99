"""Read the stored values of tensors in any layout: strided, sparse, compressed or nested."""

import torch

_COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def get_strided_values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored numbers of a sparse or nested tensor, sharing their memory; a strided tensor as it is."""
    # All values of a jagged tensor in one strided tensor.
    if tensor.is_nested:
        tensor = tensor.values()
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        # `values` requires a coalesced tensor, and `coalesce` would make a copy.
        return tensor._values()
    # Any other layout, such as MKL-DNN's, has no accessor for its values.
    return tensor.values() if tensor.layout in _COMPRESSED_LAYOUTS else tensor.to_dense()
