"""Parts that only some decoders have: mixtures of experts and latent attention, in numbers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """Feed-forward layers that are ``count`` experts behind a router; a token passes through ``active`` of them.

    Attributes:
        ffn_size: of one expert.
        sparse: for each layer, whether it is a mixture; the others have one dense MLP.
        shared_ffn: of the expert that every token passes through; 0 where there is none.
        shared_gate: the shared expert's output is multiplied by a sigmoid of a projection of the token (qwen2-moe).
        score: ``"softmax"`` or ``"sigmoid"`` of the router's logits.
        normalised: the weights of the chosen experts are made to add up to one.
        groups, active_groups: experts are chosen within the best groups only (DeepSeek-V3, equation 16 ff. of
            arXiv:2412.19437); 1 and 1 for a free choice.
        scaling: factor of the chosen experts' weights.
        bias: a correction is added to the scores for the choice, not for the weights; kept in fp32.
    """

    count: int
    active: int
    ffn_size: int
    sparse: tuple[bool, ...]
    shared_ffn: int = 0
    shared_gate: bool = False
    score: str = "softmax"
    normalised: bool = True
    groups: int = 1
    active_groups: int = 1
    scaling: float = 1.0
    bias: bool = False

    def parameters(self, hidden: int) -> int:
        """Parameters of one sparse layer's MLP."""
        shared = 3 * hidden * self.shared_ffn + (hidden if self.shared_gate else 0)
        router = self.count * (hidden + (1 if self.bias else 0))
        return self.count * 3 * hidden * self.ffn_size + router + shared


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from one small vector a token.

    Attributes:
        q_rank: size of the queries' latent vector; ``None`` for a full projection.
        kv_rank: size of the latent vector of keys and values.
        nope_dim, rope_dim: parts of a query's and a key's head without and with rotation.
        value_dim: of a value's head.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def parameters(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's attention, its latent norms included."""
        query = heads * (self.nope_dim + self.rope_dim)
        queries = hidden * query if self.q_rank is None else self.q_rank * (hidden + 1 + query)
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank
        up = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return queries + keys + up + hidden * heads * self.value_dim
