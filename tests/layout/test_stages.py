"""Layers over pipeline stages: uneven and interleaved, against megatron-core where it computes the same."""

import pytest

from rl3d.layout import LayoutError, Mesh, ParamSpec, ShardLayout, TrainLayout, stage_chunks, stage_layers


def test_thirty_layers_over_four_stages_are_all_built():
    # Megatron-LM issue 1304: 30 // 4 = 7 layers a stage built a model of 28 without a word
    layers = stage_layers(30, 4)
    assert [len(stage) for stage in layers] == [8, 8, 7, 7]
    assert [layer for stage in layers for layer in stage] == list(range(30))
    assert stage_layers(5, 2) == ((0, 1, 2), (3, 4))
    assert stage_layers(4, 2)[1] == (2, 3), "a stage without the offset would get layers 0 and 1"


def test_chunks_follow_megatrons_interleaved_order():
    # the example in megatron-core's get_num_layers_to_build: 8 layers, 2 stages, 4 chunks
    assert stage_chunks(8, 2, 4) == (
        (range(0, 1), range(2, 3), range(4, 5), range(6, 7)),
        (range(1, 2), range(3, 4), range(5, 6), range(7, 8)),
    )
    assert stage_layers(8, 2, 2) == ((0, 1, 4, 5), (2, 3, 6, 7))


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(8, 2, 2), (24, 4, 3), (30, 4, 1), (7, 2, 2), (30, 4, 2), (13, 3, 4)])
def test_every_layer_is_held_once_and_execution_order_is_layer_order(layers, pp, vpp):
    chunks = stage_chunks(layers, pp, vpp)
    assert [layer for c in range(vpp) for s in range(pp) for layer in chunks[s][c]] == list(range(layers))
    counts = [len(stage) for stage in stage_layers(layers, pp, vpp)]
    assert counts == [layers // pp + (stage < layers % pp) for stage in range(pp)]
    assert all(list(stage) == sorted(stage) for stage in stage_layers(layers, pp, vpp))


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(LayoutError, match="3 layers do not fill pp = 4 stages"):
        stage_layers(3, 4)
    with pytest.raises(LayoutError, match=r"3 layers do not fill pp x vpp = 2 x 2 = 4 virtual stages"):
        stage_layers(3, 2, 2)
    with pytest.raises(LayoutError, match="vpp = 2 interleaves .* pp = 1"):
        stage_layers(8, 1, 2)


def test_the_grammar_knows_interleaved_stages():
    layout = TrainLayout.parse("tp2.pp2.vpp2.zero1")
    assert layout == TrainLayout(tp=2, pp=2, zero=1, vpp=2)
    assert str(layout.resolve(8)) == "tp2.pp2.vpp2.dp2.zero1" and TrainLayout.parse(str(layout)) == layout
    assert str(TrainLayout.parse("pp2.vpp1")) == "tp1.pp2.zero1"
    with pytest.raises(LayoutError, match="vpp2 interleaves .* drop vpp2 or write pp2"):
        TrainLayout.parse("tp2.vpp2")


def test_shards_of_interleaved_and_uneven_stages():
    specs = [ParamSpec(f"decoder.layers.{i}.w", (4, 4), 0, layer=i) for i in range(8)]
    tied = ParamSpec("embedding.word_embeddings.weight", (4, 4), 0, place="pre+post")
    layout = ShardLayout.training(Mesh(1, 2, 1), 8, vpp=2)
    assert layout.name == "tp1.pp2.vpp2.dp1.zero1"
    assert [layout.shards(spec)[0].ranks for spec in specs] == [(0,), (0,), (1,), (1,)] * 2
    assert layout.shards(tied)[0].ranks == (0, 1)
    uneven = ShardLayout.training(Mesh(1, 2, 1), 5)
    assert [uneven.shards(spec)[0].ranks for spec in specs[:5]] == [(0,), (0,), (0,), (1,), (1,)]
