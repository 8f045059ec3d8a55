"""The torch functions that access only a tensor's metadata; they don't settle a table."""

from torch import Tensor

METADATA_FUNCTIONS = {
    getattr(getattr(Tensor, name), accessor)
    for name in (
        "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "ndim",
        "grad_fn", "is_sparse", "is_cuda", "is_meta", "is_quantized", "names", "itemsize", "nbytes",
        "_version", "_backward_hooks", "output_nr", "retains_grad", "is_cpu", "is_nested",
        "_grad", "_base", "_post_accumulate_grad_hooks", "is_sparse_csr", "is_mkldnn",
    )
    for accessor in ("__get__", "__set__", "__delete__")
    if hasattr(getattr(Tensor, name, None), accessor)
} | {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous",
        "is_floating_point", "is_complex", "requires_grad_", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook", "storage_offset", "__len__", "get_device",
        "is_shared", "is_pinned",
    )
}  # fmt: skip
