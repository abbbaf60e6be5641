"""What a DP rank holds at each ZeRO stage: our arithmetic against DeepSpeed's own bookkeeping on two ranks."""

import numpy as np
import pytest

from rl3d.layout import LayoutError, Mesh, ParamSpec, ShardLayout
from rl3d.reshard import build_plan
from tests.ranks import run_ranks
from tests.reshard.models import llama
from tests.reshard.partition_checks import SPECS


@pytest.fixture(scope="module")
def held():
    return run_ranks("tests.reshard.partition_checks:main", nproc=2, timeout=150)


@pytest.mark.parametrize("optimizer", ["DeepSpeedZeroOptimizer 1", "DeepSpeedZeroOptimizer 2", "BF16_Optimizer 1"])
def test_partitions_are_deepspeeds(held, optimizer):
    layout = ShardLayout.partitions(Mesh(1, 1, 2), 1, SPECS)
    assert set(layout.flat.length.values()) == set(held[optimizer + " length"])
    for rank in range(2):
        found = []
        for spec in SPECS:
            runs = [(cell.start, cell.stop) for cell in layout.cells(spec) if rank in cell.ranks]
            found.append([min(a for a, _ in runs), max(b for _, b in runs)] if runs else None)
        assert found == held[optimizer][rank]
        assert None in found and any(f and f != [0, s.numel] for f, s in zip(found, SPECS, strict=True))


def test_flat_shards_are_deepspeeds(held):
    layout = ShardLayout.training(Mesh(1, 1, 2), 1, zero=3)
    start = 0
    for index, spec in enumerate(SPECS):
        whole = np.arange(start, start + spec.numel, dtype=float).reshape(spec.shape)
        start += spec.numel
        for rank in range(2):
            local = np.array(held["shards"][rank][index])
            assert layout.local_shape(spec) == local.shape
            covered = 0
            for box, offset, pitch in layout.holdings(rank, [spec])[spec.name]:
                at = offset + np.arange(box.rows)[:, None] * pitch + np.arange(box.cols)
                expected = whole.reshape(spec.shape[0], -1)[box.row : box.row + box.rows, box.col : box.col + box.cols]
                np.testing.assert_array_equal(local[at], expected)
                covered += box.numel
            assert covered == min(spec.numel - rank * local.size, local.size)


def test_a_rank_sends_what_it_has_updated_and_nothing_else():
    """TP1.DP4 partitions -> TP4: with whole tensors everywhere nothing would move; deferring the all-gather moves 3/4."""
    specs = [s for s in llama(2, 16, 16, 16, 48) if not s.name.endswith("bias")]
    dst = ShardLayout.replicas(4, [range(4)], 2)
    gathered = build_plan(specs, ShardLayout.training(Mesh(1, 1, 4), 2), dst).certificate
    deferred = build_plan(specs, ShardLayout.partitions(Mesh(1, 1, 4), 2, specs), dst).certificate
    assert sum(gathered.received) == 0 and deferred.ratio == 1.0
    assert 0.6 < sum(deferred.received) / (sum(deferred.received) + deferred.local) < 0.8


def test_groups_are_laid_out_one_after_the_other_and_the_tied_copy_comes_last():
    specs = llama(2, 4, 4, 4, 4, tied=True)
    names = [s.name for s in specs]
    decay, rest = [n for n in names if "norm" not in n], [n for n in names if "norm" in n]
    flat = ShardLayout.partitions(Mesh(1, 2, 3), 2, specs, groups=[decay, rest]).flat
    assert flat.offset[0, "embedding.word_embeddings.weight"] == 0
    on_last = [s for s in specs if s.name in decay and s.on_stage(1, [(0,), (1,)])]
    before = sum(s.numel for s in on_last if s.layer is not None)
    assert flat.offset[1, "embedding.word_embeddings.weight"] == before
    assert flat.length[1, "embedding.word_embeddings.weight"] == -(-(before + 16) // 6) * 2
    assert flat.offset[1, "decoder.final_layernorm.weight"] == 4


def test_partitions_refuse_what_they_cannot_lay_out():
    specs = llama(1, 4, 4, 4, 4)
    with pytest.raises(LayoutError, match="every parameter must be in one optimiser group.*final_layernorm"):
        names = [s.name for s in specs if "final" not in s.name]
        ShardLayout.partitions(Mesh(1, 1, 2), 1, specs, groups=[names])
    with pytest.raises(LayoutError, match="optimiser groups of their own"):
        ShardLayout.partitions(Mesh(1, 1, 2), 1, llama(1, 4, 4, 4, 4, experts=2))
    layout = ShardLayout.partitions(Mesh(1, 1, 2), 1, specs)
    with pytest.raises(LayoutError, match=r"other\.weight: not among the parameters"):
        layout.cells(ParamSpec("other.weight", (4, 4), 0, layer=0))
