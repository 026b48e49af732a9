"""torch's gradcheck for autograd functions of this package."""

import torch

__all__ = ["gradcheck"]


def gradcheck(
    func,
    inputs,
    eps=1e-6,
    atol=1e-5,
    rtol=1e-3,
    raise_exception=True,
    check_sparse_nnz=False,
    nondet_tol=0.0,
    check_undefined_grad=True,
    check_grad_dtypes=False,
    **options,
):
    """torch.autograd.gradcheck of a callable, or of an autograd function's class or instance.

    check_sparse_nnz: of older torch; ignored.
    """
    is_function = isinstance(func, torch.autograd.Function) or (
        isinstance(func, type) and issubclass(func, torch.autograd.Function)
    )
    return torch.autograd.gradcheck(
        func.apply if is_function else func,
        inputs,
        eps=eps,
        atol=atol,
        rtol=rtol,
        raise_exception=raise_exception,
        nondet_tol=nondet_tol,
        check_undefined_grad=check_undefined_grad,
        check_grad_dtypes=check_grad_dtypes,
        **options,
    )
