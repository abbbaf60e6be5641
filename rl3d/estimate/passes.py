"""Bytes of one model's passes over packed rows on one rank: forward alone, and forward and backward of a whole step."""

from dataclasses import dataclass

from rl3d.estimate.activations import FP32, TokenBytes, token_bytes
from rl3d.estimate.parameters import places
from rl3d.estimate.settings import MemorySettings
from rl3d.estimate.states import States
from rl3d.layout import TrainLayout, stage_layers
from rl3d.models import Architecture


@dataclass(frozen=True)
class Rows:
    """Tokens of the largest packed row, and how many rows a rank has in a step."""

    tokens: int
    count: int

    @classmethod
    def of(cls, train: TrainLayout, settings: MemorySettings) -> "Rows":
        """Rows are as full as the budget allows, but there are as many as pipeline stages; a longer sequence has a row of
        its own."""
        tokens = -(-settings.responses // (train.dp or 1)) * settings.max_sequence_length
        row = max(min(settings.micro_batch_tokens, -(-tokens // train.pp)), settings.max_sequence_length)
        return cls(row, max(1, -(-tokens // row)))


class Passes:
    """The passes of one model on one pipeline stage.

    Args:
        arch: the model.
        columns: this rank's share of the padded vocabulary; 0 for a value head.
        train, settings: how it is trained.
        stage: which pipeline stage.
    """

    def __init__(self, arch: Architecture, columns: int, train: TrainLayout, settings: MemorySettings, stage: int):
        self.arch, self.train, self.settings, self.stage = arch, train, settings, stage
        self.last = stage == train.pp - 1
        self.columns = columns if self.last else 0
        self.rows = Rows.of(train, settings)
        self.token: TokenBytes = token_bytes(arch, train.tp, settings)
        self.layers = len(stage_layers(arch.num_layers, train.pp, train.vpp)[stage])

    def forward(self, state: States) -> dict[str, int]:
        """Without gradients: one layer's activations, or the logits of a chunk after the layers are done."""
        token, row = self.token, self.rows.tokens
        layers = token.forward * row
        chunk = self._logits(backward=False)
        head = 3 * token.hidden * row + chunk if chunk else 0.0
        if head < layers:
            chunk = 0.0
        return self._items(max(layers, head) - chunk, chunk, 0, state)

    def backward(self, state: States) -> dict[str, int]:
        """Forward and backward over the micro-batches of a step, at the moment that needs most."""
        saved, b = self._saved(), self.settings.element
        widened = FP32 if self.settings.bf16 else 0  # bf16 gradients are widened to be added up
        vocabulary = self.columns * self.arch.hidden_size
        tied = b * vocabulary if self.arch.tied and self.train.pp == 1 else 0  # waits for the embedding's own gradient
        largest = max(places(self.arch, self.arch.padded_vocab(self.train.tp), self.train.tp).layer)
        chunk = self._logits(backward=True)
        work = {
            "logits": b * vocabulary + chunk + 2 * self.token.hidden * self.rows.tokens if chunk else 0.0,
            "head": (b + widened) * vocabulary,
            "layer": self._layer() + (b + widened) * largest + state.bucket + tied,
        }
        most = max(work, key=lambda name: work[name])
        # at the first reduction some activations are gone
        gone = (1 - state.left) * (saved + state.gathered) if state.within else 0.0
        work["reduction"] = self._layer() * state.left + state.within + tied - gone
        if work["reduction"] > work[most]:
            most = "reduction"
        chunk = chunk if most == "logits" else 0.0
        gradients = state.gradients
        if self.rows.count == 1:  # the only row's activations go as its gradients come
            gradients = max(0, int(gradients - saved))
        if state.gradients + state.after > gradients + saved + work[most] + state.gathered:
            return {"gradients": state.gradients, "reduction": state.after}
        return self._items(saved + work[most] - chunk, chunk, gradients, state)

    def _items(self, activations: float, logits: float, gradients: int, state: States) -> dict[str, int]:
        messages = 2 * self.token.hidden * self.rows.tokens if self.train.pp > 1 else 0
        return {"gradients": gradients, "activations": int(activations), "logits": int(logits),
                "gathered weights": state.gathered, "pipeline messages": int(messages)}  # fmt: skip

    def _saved(self) -> float:
        """Activations of all rows that are between their forward and their backward pass (1F1B)."""
        train, token = self.train, self.token
        if train.vpp == 1:
            held = min(train.pp - self.stage, self.rows.count) * self.layers
        else:  # counted in chunks of layers, Narayanan et al. 2021, section 2.2
            chunks = (train.pp - self.stage - 1) * 2 + (train.vpp - 1) * train.pp + 1
            held = min(chunks, self.rows.count * train.vpp) * -(-self.layers // train.vpp)
        ends = token.ends + (token.hidden if self.last else 0)
        return (held * token.kept + ends) * self.rows.tokens

    def _layer(self) -> float:
        """Working memory of one layer's backward pass, with what recomputing brings back."""
        return (self.token.backward + self.token.layer - self.token.kept) * self.rows.tokens

    def _logits(self, *, backward: bool) -> float:
        """fp32 logits of one chunk with what is computed from them (:mod:`rl3d.engine.vocab_parallel`)."""
        settings, columns = self.settings, self.columns
        chunk = min(settings.logprob_chunk_tokens, self.rows.tokens)
        out = 2 * settings.element if backward else 0  # the gradients of this chunk and of the one before
        if settings.fused:
            return float(FP32 + out) * chunk * columns
        widened = 0.0
        if settings.bf16 and columns:  # no mixed-precision product: both factors are widened
            widened = FP32 * (columns + chunk) * self.arch.hidden_size + (FP32 + out / 2) * chunk * columns
        return max(float(5 * FP32 + out) * chunk * columns, widened)
