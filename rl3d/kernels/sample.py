"""What a draw needs of each block of the vocabulary, in one pass over the logits: temperature, Gumbel noise from the
stateless hash, the two best perturbed logits that a filter leaves and the log partition function; and a small kernel that
joins the blocks.

The hash is :func:`rl3d.generation.noise.log_exponentials`, integer for integer. Perturbed logits are right to 2e-6, so a
draw is the one that torch's operations give, or it is said to be close.

Shape legend: B rows, V vocabulary columns of this shard, N blocks (of all shards where they are joined).
"""

import torch
from torch import Tensor

from rl3d.kernels.backend import begin, block_of, constexpr, interpreted, jit, overlap, tl

BLOCK = 4096


@jit
def _exponential(uniform, INTERPRETED: constexpr):
    """-log(1 - u) to 3e-7 of its value: a polynomial (least squares at Chebyshev's points) where the logarithm of what is
    nearly 1 has few digits, the GPU's own logarithm elsewhere."""
    near = uniform * 1.1863799095153809 - 1.0840892791748047
    near = near * uniform + 0.7871947288513184
    near = near * uniform + 0.0374123640358448
    near = near * uniform + 0.27235743403434753
    near = near * uniform + 0.33185362815856934
    near = near * uniform + 0.5000368356704712
    near = near * uniform + 0.9999998211860657
    rest = 1.0 - uniform
    if INTERPRETED:
        far = tl.log2(rest)
    else:
        far = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [rest], dtype=tl.float32, is_pure=True, pack=1)
    return tl.where(uniform < 0.5, near * uniform, far * -0.6931471805599453)


@jit
def _perturbed(score, top, temperature, GREEDY: constexpr):
    """What a score says of logit + noise; rows without noise are scored by the logit itself."""
    if GREEDY:
        return score
    return tl.where(temperature > 0, tl.where(score > 0, top + tl.log(tl.maximum(score, 1e-37)), -float("inf")), score)


@jit
def _partials(logits_ptr, keys_ptr, positions_ptr, vocabulary_ptr, temperature_ptr, edges_ptr, out_ptr, width, valid, start,
              blocks, POSITION: constexpr, MUL1: constexpr, MUL2: constexpr, GREEDY: constexpr, PLAIN: constexpr,
              FILTERED: constexpr, COLUMNS: constexpr, INTERPRETED: constexpr, BLOCK: constexpr,
              OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < valid
    plain = tl.load(logits_ptr + row * width + column, mask=inside, other=-float("inf")).to(tl.float32)
    scaled = plain
    temperature = tl.load(temperature_ptr + row)
    if PLAIN:
        scaled = tl.div_rn(plain, tl.zeros((BLOCK,), dtype=tl.float32) + tl.where(temperature > 0, temperature, 1.0))
    top = tl.maximum(tl.max(scaled, axis=0), -3e38)
    weight = tl.where(inside, tl.exp(scaled - top), 0.0)
    score = scaled
    if not GREEDY:
        x = tl.load(keys_ptr + row) + tl.load(positions_ptr + row) * POSITION
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MUL1
        x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MUL2
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        y = tl.load(vocabulary_ptr + column, mask=inside, other=0) ^ x
        y = y * MUL1
        y = y ^ ((y >> 32) & 0xFFFFFFFF)
        y = y * MUL2
        y = y & 0x7FFFFFFFFFFFFFFF
        uniform = y.to(tl.float32) * 1.0842021724855044e-19  # 2**-63
        uniform = tl.minimum(tl.maximum(uniform, 1.0842021724855044e-19), 0.99999994039535522)  # 1 - 2**-24
        # the largest of scaled - log(E) is the largest of exp(scaled) / E, without a logarithm for each
        score = tl.where(temperature > 0, weight / _exponential(uniform, INTERPRETED), scaled)
        score = tl.where(inside, score, -float("inf"))
    at = out_ptr + (row * blocks + block) * COLUMNS
    if FILTERED:
        exact, loose = tl.load(edges_ptr + row * 3 + 1), tl.load(edges_ptr + row * 3 + 2)
        score = tl.where(scaled >= loose, score, -float("inf"))
        widest = tl.max(score, axis=0)
        first = tl.minimum(tl.min(tl.where(score == widest, column, 2147483647), axis=0), valid - 1)
        left = tl.sum(tl.where(scaled >= exact, weight, 0.0), axis=0)
        tl.store(at + COLUMNS - 3, (top + tl.log(left)).to(tl.float64))
        tl.store(at + COLUMNS - 2, _perturbed(widest, top, temperature, GREEDY).to(tl.float64))
        tl.store(at + COLUMNS - 1, (first + start).to(tl.float64))
        score = tl.where(scaled >= exact, score, -float("inf"))
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(score == best, column, 2147483647), axis=0)  # of equals the lowest
    first = tl.minimum(first, valid - 1)  # nothing equals the best when all are NaN
    second = tl.max(tl.where(column == first, -float("inf"), score), axis=0)
    lse = top + tl.log(tl.sum(weight, axis=0))
    tl.store(at, lse.to(tl.float64))
    tl.store(at + 1, _perturbed(best, top, temperature, GREEDY).to(tl.float64))
    tl.store(at + 2, (first + start).to(tl.float64))
    tl.store(at + 3, _perturbed(second, top, temperature, GREEDY).to(tl.float64))
    tl.store(at + 4, tl.sum(tl.where(column == first, scaled, 0.0), axis=0).to(tl.float64))
    if PLAIN:
        top = tl.maximum(tl.max(plain, axis=0), -3e38)
        lse = top + tl.log(tl.sum(tl.where(inside, tl.exp(plain - top), 0.0), axis=0))
        tl.store(at + 5, lse.to(tl.float64))
        tl.store(at + 6, tl.sum(tl.where(column == first, plain, 0.0), axis=0).to(tl.float64))


def draw_partials(logits_BV: Tensor, valid: int, start: int, keys_B: Tensor, positions_B: Tensor, vocabulary_V: Tensor,
                  temperature_B: Tensor, multipliers: tuple[int, int, int], *, greedy: bool, plain: bool,
                  edges_B3: Tensor | None = None) -> Tensor:  # fmt: skip
    """fp64 [B, N, 5 to 10], blocks rising with the vocabulary; in each the log of the sum of exp(logit / temperature), the
    best perturbed logit, its global id, the second best, and the best's logit / temperature; with ``plain`` also the first
    and the last of these at temperature 1. Ties go to the lowest id. Only for Triton.

    With filters (``edges_B3``, of :func:`rl3d.kernels.threshold.filter_edges`) the best ones are of what the filter leaves,
    and three columns more say: the log of the sum over what it leaves, the best perturbed logit that the looser filter
    leaves, and its global id.

    Args:
        logits_BV: fp32 or a 16-bit dtype, rows contiguous; columns from ``valid`` on are padding.
        start: global id of column 0.
        keys_B, positions_B, vocabulary_V: int64, what the noise is a hash of.
        temperature_B: fp32; rows of 0 get no noise.
        multipliers: the hash's, as signed 64-bit integers: of positions, and its two rounds'.
        greedy: no row gets noise, whatever its temperature.
    """
    rows = len(logits_BV)
    blocks, columns = -(-valid // BLOCK), (7 if plain else 5) + (0 if edges_B3 is None else 3)
    out = torch.empty(rows, blocks, columns, dtype=torch.float64, device=logits_BV.device)
    if rows and blocks:
        _partials[(rows, blocks)](
            logits_BV, keys_B, positions_B, vocabulary_V, temperature_B, temperature_B if edges_B3 is None else edges_B3,
            out, logits_BV.stride(0), valid, start, blocks, POSITION=multipliers[0], MUL1=multipliers[1],
            MUL2=multipliers[2], GREEDY=greedy, PLAIN=plain, FILTERED=edges_B3 is not None, COLUMNS=columns,
            INTERPRETED=interpreted(), BLOCK=BLOCK, num_warps=8, **overlap(logits_BV.device),
        )  # fmt: skip
    return out


@jit
def _log_sum_exp(values):
    top = tl.maximum(tl.max(values, axis=0), -1e300)
    return top + tl.log(tl.sum(tl.exp(values - top), axis=0))


@jit
def _join(parts_ptr, temperature_ptr, edges_ptr, tokens_ptr, packed_ptr, stride, blocks, margin, PLAIN: constexpr,
          FILTERED: constexpr, COLUMNS: constexpr, WIDTH: constexpr, OVERLAP: constexpr):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, WIDTH)
    inside = block < blocks
    at = parts_ptr + (row * blocks + block) * COLUMNS
    lse = tl.load(at, mask=inside, other=-float("inf"))
    best = tl.load(at + 1, mask=inside, other=-float("inf"))
    ids = tl.load(at + 2, mask=inside, other=0.0)
    second = tl.load(at + 3, mask=inside, other=-float("inf"))
    logit = tl.load(at + 4, mask=inside, other=0.0)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(inside & (best == top), block, 2147483647), axis=0)  # shards rise with the vocabulary
    winner = tl.minimum(winner, blocks - 1)  # nothing equals the best when all are NaN
    won = block == winner
    rival = tl.max(tl.maximum(tl.where(won, -float("inf"), best), tl.where(won, second, -float("inf"))), axis=0)
    token = tl.sum(tl.where(won, ids, 0.0), axis=0)
    chosen = tl.sum(tl.where(won, logit, 0.0), axis=0)
    logprob = (chosen - _log_sum_exp(lse)).to(tl.float32).to(tl.float64)
    plain = logprob
    sampled = logprob
    close = top - rival < margin
    if FILTERED:
        # moving the filter's edge by the margin changes the draw: outwards another would win, inwards this one is out
        left = tl.load(at + COLUMNS - 3, mask=inside, other=-float("inf"))
        wide = tl.load(at + COLUMNS - 2, mask=inside, other=-float("inf"))
        sampled = (chosen - _log_sum_exp(left)).to(tl.float32).to(tl.float64)
        found = tl.minimum(tl.min(tl.where(inside & (wide == tl.max(wide, axis=0)), block, 2147483647), axis=0), blocks - 1)
        other = tl.sum(tl.where(block == found, tl.load(at + COLUMNS - 1, mask=inside, other=0.0), 0.0), axis=0)
        close = close | (other != token) | (chosen < tl.load(edges_ptr + row * 3).to(tl.float64))
    if PLAIN:
        lse = tl.load(at + 5, mask=inside, other=-float("inf"))
        logit = tl.load(at + 6, mask=inside, other=0.0)
        plain = tl.sum(tl.where(won, logit, 0.0), axis=0) - _log_sum_exp(lse)
        plain = plain.to(tl.float32).to(tl.float64)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(packed_ptr + row, token)
    tl.store(packed_ptr + stride + row, tl.where(close, 1.0, 0.0).to(tl.float64))
    tl.store(packed_ptr + 2 * stride + row, logprob)
    tl.store(packed_ptr + 3 * stride + row, tl.where(tl.load(temperature_ptr + row) > 0, sampled, 0.0))
    tl.store(packed_ptr + 4 * stride + row, plain)


def join_partials(parts_BN: Tensor, temperature_B: Tensor, margin: float, tokens_B: Tensor, packed: Tensor,
                  edges_B3: Tensor | None = None) -> None:  # fmt: skip
    """Write ``tokens_B`` (int64) and ``packed`` (fp64 [5, B], rows contiguous): token, whether a rival or a filter's edge
    came within ``margin``, log-probability under the tempered distribution, that under what the filters left (0 where
    greedy), and at temperature 1.

    ``parts_BN``: :func:`draw_partials` of all shards, [B, N, 5 to 10], with the same ``edges_B3``. Only for Triton.
    """
    rows, blocks, columns = parts_BN.shape
    if rows:
        _join[(rows,)](
            parts_BN.contiguous(), temperature_B, temperature_B if edges_B3 is None else edges_B3, tokens_B, packed,
            packed.stride(0), blocks, margin, PLAIN=columns in (7, 10), FILTERED=edges_B3 is not None, COLUMNS=columns,
            WIDTH=block_of(blocks), num_warps=1 if blocks <= 128 else 4, **overlap(parts_BN.device),
        )  # fmt: skip
