"""A norm of your own, declared in Python: a function of torch, and its parameters.

`nn`'s modules, `swap_norms`, the training loop and fairseq's models accept it in place of a name. It needs no kernel;
the loop calls it through PyTorch's dispatcher, so it is slower than the table's norms.
"""

from typing import Any

from .declarations import norm
from .declarations.norm import Parameter, using
from .declarations.norm import declared as declared

__all__ = ["Norm", "Parameter", "using"]


class Norm(norm.Norm):
    """The base class of norms: override `normalize`, and declare the parameters and options.

    >>> import torch
    >>> class MaxNorm(Norm):
    ...     name, equation = "maxnorm", "y = γ⊙x/max(max|x|, ε)"
    ...     parameters, options = {"weight": Parameter()}, {"eps": 1e-5}
    ...     def normalize(self, x, weight, eps):
    ...         return weight * x / x.abs().amax(-1, keepdim=True).clamp_min(eps)
    >>> MaxNorm()(4)(torch.tensor([1.0, -2.0, 4.0, 0.0]))
    tensor([ 0.2500, -0.5000,  1.0000,  0.0000], grad_fn=<DivBackward0>)

    Pass other options by keyword: MaxNorm(eps=1e-3). Called with a width, the object makes a module. Give the outermost
    factor, such as γ, the name `weight`: schemes that set the initial values of norms look for it.
    """

    def __call__(self, width: int, device: Any = None, dtype: Any = None) -> Any:
        """Makes a module over rows of this width."""
        from .nn.own import OwnNorm

        return OwnNorm(self, width, device=device, dtype=dtype)
