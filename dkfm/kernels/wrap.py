"""What kernels made of one other kernel share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

from dkfm.kernels.base import Definiteness, Kernel, PreparedKernel
from dkfm.kernels.blocks import Evaluator
from dkfm.kernels.parameters import require_kernels
from dkfm.kernels.rows import Array, Rows

__all__ = ["Pointwise", "Wrapper", "bracketed"]


class Wrapper(PreparedKernel):
    """A kernel made of another, a field of every subclass; it is what that one is, unless it says otherwise."""

    kernel: Kernel

    def __post_init__(self) -> None:
        require_kernels(self, (self.kernel,))

    @property
    def definiteness(self) -> Definiteness:
        """That of the kernel."""
        return self.kernel.definiteness

    @property
    def single(self) -> bool:
        """Whatever the kernel does with float32 rows, it gives float32 values for them."""
        return True

    @property
    def fills(self) -> bool:
        """Where the kernel does."""
        return self.kernel.fills

    @property
    def sparse(self) -> bool:
        """Where the kernel does."""
        return self.kernel.sparse

    @property
    def translation_invariant(self) -> bool:
        """Where the kernel is."""
        return self.kernel.translation_invariant

    @property
    def blocks(self) -> int:
        """Those of the kernel."""
        return self.kernel.blocks

    @property
    def copies(self) -> int:
        """Those of the kernel."""
        return self.kernel.copies


class Pointwise(Wrapper):
    """A function of the values of a kernel, done in place."""

    @abstractmethod
    def _profile(self, values: Array) -> Array:
        """Return the function of values, which it may overwrite."""

    def prepare(self, landmarks: Rows) -> Evaluator:
        """Prepare the kernel."""
        prepared = self.kernel.against(landmarks)
        return lambda Z, out=None, /: self._profile(prepared(Z, out))

    def resolve(self, X: Rows) -> Kernel:
        """Resolve the kernel."""
        return replace(self, kernel=self.kernel.resolve(X))  # type: ignore[type-var]  # every subclass is a dataclass

    def diagonal(self, X: Rows) -> Array:
        """Return the function of the diagonal."""
        return self._profile(self.kernel.self_similarities(X))


def bracketed(kernel: Kernel, *looser: type[Kernel]) -> str:
    """Return the repr of a kernel, in brackets where it is of a class that binds less tightly."""
    return f"({kernel!r})" if isinstance(kernel, looser) else repr(kernel)
