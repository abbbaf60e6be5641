"""What memory depends on beside the model and the layouts."""

from dataclasses import dataclass

from rl3d.config.engines import VLLM_SHARE
from rl3d.models import Architecture


@dataclass(frozen=True)
class MemorySettings:
    """Settings that decide how many bytes a run needs. Defaults are those of the configuration.

    Attributes:
        dtype: of weights and activations, ``"bfloat16"`` or ``"float32"``.
        device: ``"cuda"`` or ``"cpu"``: kernels save different tensors.
        max_sequence_length: longest prompt + response in tokens.
        responses: responses of one optimiser step over all ranks (mini-batch times samples).
        micro_batch_tokens, logprob_chunk_tokens: as in the configuration.
        recompute: activations recomputed in the backward pass: ``"none"``, ``"selective"`` (core attention) or ``"full"``.
        sequence_parallel: norms and residuals cut over the tensor-parallel ranks.
        offload: ``"none"``, ``"optimizer"`` or ``"params"`` to host memory.
        training_copy: ``"keep"`` or ``"drop"`` the training weights during generation.
        gradients, optimizer_state: ``"keep"``, or ``"drop"`` and ``"host"`` during generation.
        alias: generation reads weights that lie in the training weights as it needs them where they are.
        reference, critic: ``"none"``, or where the model stays between uses: ``"device"`` or ``"host"``.
        critic_learns: the critic has gradients and an optimiser of its own.
        critic_arch: the critic's shape; None: the policy's.
        max_sequences, max_prefill_tokens: sampling.
        step_prompts, samples: prompts of a step over all replicas, and samples of each: the built-in engine makes its cache
            for a replica's share of them. None: for ``max_sequences``, as with the strategy ``"full"``.
        engine: what generates: ``"megatron"``, ``"hf"`` or ``"vllm"``.
        vllm_share: of the device that vLLM takes in all (its ``gpu_memory_utilization``).
        vllm_cache: bytes of vLLM's cache, where it was told; None: what its share leaves.
        vllm_sleeps: vLLM gives weights and cache back during training, which it can on CUDA only.
        device_bytes: memory of the whole device; None: not known.
        staging_bytes: of a switch, per direction.
        bucket: elements of DeepSpeed's reduction buckets, at most.
        flash: use the variable-length kernel where there is one (CUDA, bf16).
        grouped_varlen: that kernel knows grouped queries (torch 2.14); before, keys and values are repeated.
    """

    dtype: str = "bfloat16"
    device: str = "cuda"
    max_sequence_length: int = 768
    responses: int = 256
    micro_batch_tokens: int = 4096
    logprob_chunk_tokens: int = 1024
    recompute: str = "none"
    sequence_parallel: bool = False
    offload: str = "none"
    training_copy: str = "keep"
    gradients: str = "keep"
    optimizer_state: str = "keep"
    alias: bool = True
    reference: str = "device"
    critic: str = "none"
    critic_learns: bool = True
    critic_arch: Architecture | None = None
    max_sequences: int = 64
    max_prefill_tokens: int = 8192
    step_prompts: int | None = None
    samples: int = 1
    engine: str = "megatron"
    vllm_share: float = VLLM_SHARE
    vllm_cache: int | None = None
    vllm_sleeps: bool = True
    device_bytes: int | None = None
    staging_bytes: int = 48 << 20
    bucket: int = 50_000_000
    flash: bool = True
    grouped_varlen: bool = True

    def at_once(self, replicas: int) -> int:
        """Sequences that one of so many generation replicas has at a time, at most."""
        if self.step_prompts is None or self.engine != "megatron":
            return self.max_sequences
        return min(self.max_sequences, -(-self.step_prompts // replicas) * self.samples)

    @property
    def bf16(self) -> bool:
        return self.dtype == "bfloat16"

    @property
    def element(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.bf16 else 4

    @property
    def fused(self) -> bool:
        """Whether the fused kernels run, which need no intermediates."""
        return self.device == "cuda"

    @property
    def varlen(self) -> str:
        """Attention over packed rows: ``"native"`` or ``"repeated"`` in one kernel, ``"none"``: sequence by sequence."""
        if not (self.flash and self.bf16 and self.device == "cuda"):
            return "none"
        return "native" if self.grouped_varlen else "repeated"
