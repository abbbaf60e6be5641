"""What is trained in the tests of training; needs no library, so that tests can name cases before ranks start."""

from dataclasses import dataclass

BUCKET = 20_000  # elements of a reduction bucket: several fill up in one backward pass


@dataclass(frozen=True)
class Case:
    """A layout and how it is trained; the defaults are those of a plain run."""

    tp: int
    pp: int
    zero: int
    tied: bool = False
    dtype: str = "float32"
    packed: bool = True
    sp: bool = False
    recompute: str = "none"
    offload: str = "none"
    model: str = "llama"

    @property
    def source(self) -> str:
        """Directory of the model."""
        return self.model if self.model != "llama" else "tied" if self.tied else "untied"

    @property
    def name(self) -> str:
        parts = [f"tp{self.tp}.pp{self.pp}.zero{self.zero}", self.source, self.dtype]
        parts += ["padded"] * (not self.packed) + ["sp"] * self.sp + [self.recompute] * (self.recompute != "none")
        parts += [self.offload] * (self.offload != "none")
        return "-".join(parts)
