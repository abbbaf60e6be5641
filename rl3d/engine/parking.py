"""What training keeps on the device while the actor generates: weights, gradients and optimiser state by policy."""

from torch import Tensor

from rl3d.engine.residency import Residency
from rl3d.engine.zero import ZeroEngine

GRADIENTS, OPTIMIZER = "gradients", "optimizer state"


class Parking:
    """Gradients and optimiser state leave the device for the time of generation, as the policies say.

    Args:
        zero: whose.
        gradients: ``"keep"``, or ``"drop"``: their buffers are given back, and are zero afterwards, as after a step.
        optimizer_state: ``"keep"``, or ``"host"``: master weights and moments wait in (pinned) host memory, in buffers that
            are used again and written only after a step has changed something.

    Raises:
        ValueError: an unknown policy.
    """

    def __init__(self, zero: ZeroEngine, gradients: str = "keep", optimizer_state: str = "keep"):
        for name, value, known in (("gradients", gradients, "drop"), ("optimizer_state", optimizer_state, "host")):
            if value not in ("keep", known):
                raise ValueError(f"{name} = {value!r}: expected 'keep' or {known!r}")
        self.zero = zero
        self._places: dict[str, Residency] = {}
        if gradients == "drop":
            self._places[GRADIENTS] = Residency(lambda: self._unless_weights(zero.gradient_tensors()), "drop", at_once=False)
        if optimizer_state == "host":
            self._places[OPTIMIZER] = Residency(zero.optimizer_tensors, "host", changed=lambda: zero.changes, at_once=False)

    def _unless_weights(self, tensors: list[Tensor]) -> list[Tensor]:
        weights = {t.untyped_storage()._cdata for t in self.zero.flat_weights()}
        return [t for t in tensors if t.untyped_storage()._cdata not in weights]

    @property
    def acts(self) -> bool:
        """Whether anything leaves at all; the same on all ranks."""
        return bool(self._places)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold, or are kept for, what is parked."""
        return sum(place.host_bytes for place in self._places.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes copied to the host so far."""
        return sum(place.copied_bytes for place in self._places.values())

    def leave(self) -> dict[str, int]:
        """Park; device bytes freed, by what they were for."""
        return {name: place.leave() for name, place in self._places.items()}

    def come(self) -> dict[str, int]:
        """Bring all back; device bytes allocated. When memory does not suffice, all is away as before."""
        out: dict[str, int] = {}
        try:
            for name, place in self._places.items():
                out[name] = place.come()
        except Exception:
            for name in out:
                self._places[name].leave()
            raise
        return out


class TrainingCopy:
    """The flat training weights (16-bit, fp32 when training in fp32), which generation weights can stand for.

    Args:
        zero: whose.
        policy: ``"keep"``, or ``"drop"``: their memory is given back during generation, their contents are lost.

    Raises:
        ValueError: an unknown policy.
    """

    def __init__(self, zero: ZeroEngine, policy: str):
        if policy not in ("keep", "drop"):
            raise ValueError(f"training_copy = {policy!r}: expected 'keep' or 'drop'")
        self.zero, self.leaves = zero, policy == "drop"
        self._sizes = [flat.untyped_storage().nbytes() for flat in zero.flat_weights()]

    def drop(self) -> int:
        """Give the memory back; the bytes."""
        storages = [flat.untyped_storage() for flat in self.zero.flat_weights()]
        self._sizes = [storage.nbytes() or size for storage, size in zip(storages, self._sizes, strict=True)]
        for storage in storages:
            storage.resize_(0)
        return sum(self._sizes)

    def restore(self) -> int:
        """Have the memory again, zeros until weights are moved in; the bytes."""
        flats = self.zero.flat_weights()
        for flat, size in zip(flats, self._sizes, strict=True):
            flat.untyped_storage().resize_(size)
        for flat in flats:
            flat.zero_()  # DeepSpeed's alignment padding at the end belongs to no parameter
        return sum(self._sizes)
