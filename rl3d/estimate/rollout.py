"""Bytes of generation on one rank: its weights, the key/value cache, and what prefill and drawing tokens need."""

from dataclasses import replace

from rl3d.estimate.parameters import stage_numels
from rl3d.estimate.settings import MemorySettings
from rl3d.layout import GenLayout, TrainLayout
from rl3d.models import Architecture, parameter_specs

FP32 = 4
BUCKET_BYTES = 256 << 20
"""Most of the parameters that travel together to an engine with a model of its own (one that is larger travels alone)."""
PAGE_SIZE = {"cpu": 16, "cuda": 32}
"""Tokens of a page of the key/value cache, where nothing else is asked for."""
MAPPED_BYTES = {"cpu": 4096, "cuda": 2 << 20}
"""Pieces in which memory is mapped under the cache's addresses; keys and values of each layer begin with one."""
_PIECES = 32 << 20
_DRAW = 28  # bytes for each logit: three int64 of the noise's hash, the scaled logit


def generation_weights(arch: Architecture, padded_vocab: int, train: TrainLayout, gen: GenLayout,
                       settings: MemorySettings) -> int:  # fmt: skip
    """Bytes of one rank's shard of the generation copy; none where it is the training copy. (Where some weights only are,
    they are counted all the same.)"""
    if settings.alias and settings.training_copy == "keep" and train.zero < 3 and (train.tp, train.pp) == (gen.tp, 1):
        return 0
    return settings.element * sum(stage_numels(arch, padded_vocab, gen.tp, 1, 1, 0))


def cache_bytes(arch: Architecture, gen: GenLayout, settings: MemorySettings) -> int:
    """The pool's most: every slot can hold the longest sequence, and one page is scratch."""
    return _cache_bytes(arch, gen, settings, MAPPED_BYTES[settings.device])


def _cache_bytes(arch: Architecture, gen: GenLayout, settings: MemorySettings, piece: int = 1) -> int:
    """Keys and values of each layer are made of whole pieces."""
    page = PAGE_SIZE[settings.device]
    tokens = (settings.max_sequences * -(-settings.max_sequence_length // page) + 1) * page
    heads = max(arch.num_kv_heads // gen.tp, 1)
    pool = tokens * heads * arch.head_dim * settings.element
    return arch.num_layers * 2 * -(-pool // piece) * piece


def vllm_cache_bytes(arch: Architecture, padded_vocab: int, gen: GenLayout, settings: MemorySettings) -> int:
    """vLLM's pool, which it takes as a whole when it starts: the size that it was told, otherwise what its share of the
    device leaves beside weights and activations, at least one sequence. On a device of unknown size: room for all slots."""
    if settings.vllm_cache is not None:
        return settings.vllm_cache
    if settings.device_bytes is None:
        return _cache_bytes(arch, gen, settings)
    taken = vllm_weights(arch, padded_vocab, gen, settings) + working_bytes(arch, padded_vocab, gen, settings)
    least = _cache_bytes(arch, gen, replace(settings, max_sequences=1))
    return max(int(settings.vllm_share * settings.device_bytes) - taken, least)


def vllm_weights(arch: Architecture, padded_vocab: int, gen: GenLayout, settings: MemorySettings) -> int:
    """One rank's shard of vLLM's own copy."""
    return settings.element * sum(stage_numels(arch, padded_vocab, gen.tp, 1, 1, 0))


def fed_bytes(arch: Architecture, padded_vocab: int, settings: MemorySettings) -> int:
    """What an engine with a model of its own takes while weights are streamed into it: a bucket of whole parameters, and in
    vLLM twice the largest one, which it keeps and lays out anew."""
    sizes = [settings.element * spec.numel for spec in parameter_specs(arch, padded_vocab)]
    kept = 2 * max(sizes) if settings.engine == "vllm" else 0
    return min(sum(sizes), max(BUCKET_BYTES, max(sizes))) + kept


def captured_bytes(arch: Architecture, padded_vocab: int, gen: GenLayout, settings: MemorySettings) -> int:
    """What captured decode steps compute in, kept while training too: logits and the widest activations of all rows, beside
    the pieces in which torch takes memory. None without CUDA graphs."""
    if settings.device != "cuda" or settings.engine != "megatron" or not settings.fused:
        return 0
    row = FP32 * padded_vocab / gen.tp + settings.element * (3 * arch.ffn_size / gen.tp + 4 * arch.hidden_size)
    return int(settings.max_sequences * row) + _PIECES


def working_bytes(arch: Architecture, padded_vocab: int, gen: GenLayout, settings: MemorySettings) -> int:
    """The larger of a prefill batch's activations and one draw of a token for every sequence."""
    b, h, d = settings.element, arch.hidden_size, arch.head_dim
    q, k, f = arch.num_heads * d / gen.tp, max(arch.num_kv_heads / gen.tp, 1) * d, arch.ffn_size / gen.tp
    longest = settings.max_sequence_length
    tokens = min(settings.max_prefill_tokens, settings.max_sequences * longest)
    # the last layer's gate and up are still there while the next attention turns queries and keys
    attention = 2 * f + 2 * h + (q + 2 * k) + (3 * q + 2 * k)
    if not settings.fused:  # turning them takes fp32 intermediates
        attention = 2 * f + 2 * h + (q + 2 * k) + (1 + (14 if settings.bf16 else 8) / b) * (q + k)
    mlp = (3 if settings.fused else 4) * f + 3 * h
    logits = FP32 * settings.max_sequences * padded_vocab // gen.tp
    draw = _DRAW * settings.max_sequences * padded_vocab // gen.tp + logits
    if settings.bf16 and not settings.fused:  # without a mixed-precision product the head is widened
        draw = max(draw, logits + FP32 * padded_vocab // gen.tp * h)
    tables = 4 * d + 40  # cosines, sines, token ids, positions, rows of the cache
    return int(max((max(attention, mlp) * b + tables) * tokens, draw))
