"""Reward models against transformers on one unpadded sequence at a time."""

from dataclasses import replace

import pytest
import torch
import transformers

from rl3d.data.batch import Prompt, Sample
from rl3d.data.tiny import train_tokenizer
from rl3d.data.tokenizers import load_tokenizer
from rl3d.rewards.functions import RewardError
from rl3d.rewards.models import ModelReward
from rl3d.rewards.runner import RewardRunner

EOS = 2
WITH_BOS = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
WITHOUT_BOS = WITH_BOS.removeprefix("{{ bos_token }}")
# right padding, EOS in the middle, at the end and at the start, padding's id as a word (the sequences of case J4 among them)
SEQUENCES = [[10, 11, 12, EOS, 20, 21, 22, 23], [5, 6, EOS], [EOS], [7], [9, 0, 0], [30] * 20, [EOS, EOS, 4, EOS, EOS]]


def sample(i, text="a b", prompt_ids=(1, 5), response_ids=(6, 2), finish="stop"):
    return Sample(f"{i}-0", i, 0, list(prompt_ids), list(response_ids), [0.0], finish, text=text)


def prompt(i, text="c d", messages=None):
    return Prompt(str(i), i, text, messages, [1, 5])


def pairs_of(sequences):
    return [(sample(i, prompt_ids=s[:1], response_ids=s[1:]), prompt(i)) for i, s in enumerate(sequences)]


def decoder(pad=EOS, labels=1, kind="llama"):
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=pad, eos_token_id=EOS, num_labels=labels,
        initializer_range=0.3,
    )  # fmt: skip
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def one_at_a_time(model, sequences):
    """transformers' score of the last token of each; without a padding id it takes the last one."""
    pad, model.config.pad_token_id = model.config.pad_token_id, None
    with torch.no_grad():
        out = [model(input_ids=torch.tensor([s])).logits.item() for s in sequences]
    model.config.pad_token_id = pad
    return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    place = tmp_path_factory.mktemp("reward")
    train_tokenizer(place)
    decoder().save_pretrained(place)
    return place


@pytest.mark.parametrize("pad", [EOS, 0, None])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_last_token_is_scored_whatever_padding_looks_like(pad, kind):
    model = decoder(pad, kind=kind)
    expected = one_at_a_time(model, SEQUENCES)
    assert max(expected) - min(expected) > 0.5
    for budget in (1, 64, 10_000):  # one sample a batch, a few, all
        found = ModelReward(model, max_batch_tokens=budget).scores(pairs_of(SEQUENCES))
        assert found == pytest.approx(expected, abs=1e-5)


def test_an_encoder_classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([s])).logits.item() for s in SEQUENCES]
    assert ModelReward(model).scores(pairs_of(SEQUENCES)) == pytest.approx(expected, abs=1e-5)


class Mean(torch.nn.Module):
    """Any module: the mean of the token ids."""

    def forward(self, input_ids, attention_mask):
        return ((input_ids * attention_mask).sum(1) / attention_mask.sum(1)).float()


def test_any_module_scores_the_policys_tokens():
    expected = [sum(s) / len(s) for s in SEQUENCES]
    assert ModelReward(Mean()).scores(pairs_of(SEQUENCES)) == pytest.approx(expected)
    with RewardRunner([(Mean(), 2.0)]) as runner:
        assert runner.score(*pairs_of([[4, 6]])[0]).score == 10.0
    wrong = torch.nn.Module()
    wrong.forward = lambda input_ids, attention_mask: input_ids.float()  # type: ignore[assignment]
    (error,) = ModelReward(wrong).scores(pairs_of([[4, 6]]))
    assert isinstance(error, RewardError) and "shape (1, 2)" in str(error)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS], ids=["with bos", "without"])
def test_a_conversation_in_the_models_own_template_with_one_bos(directory, template):
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = template
    reward = ModelReward(directory, tokenizer, system_prompt="a")
    said = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "b"}]
    ids = reward.encode(sample(0, "a c"), prompt(0, None, said))
    text = "<system> a <user> c <assistant> d <user> b <assistant> a c "
    bos = tokenizer.bos_token_id
    if template == WITH_BOS:
        assert ids == tokenizer(tokenizer.bos_token + text, add_special_tokens=False)["input_ids"]
    else:
        assert ids == [bos, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert ids[0] == bos and ids.count(bos) == 1


def test_plain_text_has_one_bos_and_ends_as_the_response_did(directory):
    reward = ModelReward(directory).load()
    tokenizer = reward.tokenizer
    ids = reward.encode(sample(0, " a c"), prompt(0, "d"))
    assert ids == [*tokenizer("d a c")["input_ids"], EOS]
    assert reward.encode(sample(0, " a c", finish="length"), prompt(0, "d")) == ids[:-1]
    begins = [tokenizer.bos_token_id] == tokenizer("x")["input_ids"][:1]
    assert ids.count(tokenizer.bos_token_id) == int(begins)
    again = reward.encode(sample(0, " a c"), prompt(0, tokenizer.bos_token + "d"))
    assert again.count(tokenizer.bos_token_id) == 1


def test_a_directory_scores_as_transformers_does(directory):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    reward = ModelReward(directory)
    pairs = [(sample(i, text), prompt(i, "c d")) for i, text in enumerate(("a", "b c d", "a b c d 1 2 3"))]
    expected = one_at_a_time(model, [reward.load().encode(*pair) for pair in pairs])
    assert reward.scores(pairs) == pytest.approx(expected, abs=1e-5)
    with RewardRunner([reward]) as runner:  # beside sampling, one at a time
        futures = [runner.submit(*pair) for pair in pairs]
        assert [future.result(timeout=60).score for future in futures] == pytest.approx(expected, abs=1e-5)


def test_weights_kept_on_the_host_are_back_there_after_use(directory):
    reward = ModelReward(directory, residency="host").load()
    held = [t.data_ptr() for t in reward._host]
    expected = ModelReward(directory).scores(pairs_of(SEQUENCES[:1]))
    assert reward.scores(pairs_of(SEQUENCES[:1])) == reward.scores(pairs_of(SEQUENCES[:1])) == expected
    assert [t.data_ptr() for t in [*reward._module.parameters(), *reward._module.buffers()]] == held


def test_what_cannot_be_scored_fails_alone():
    reward = ModelReward(decoder())
    found = reward.scores(pairs_of([[5, 6], [5] * 65, [5, 90], [8]]))
    assert found[0] == pytest.approx(one_at_a_time(decoder(), [[5, 6]])[0], abs=1e-5) and isinstance(found[3], float)
    assert "65 tokens; the model reads 1 to 64" in str(found[1]) and "token 90, but its vocabulary has 90" in str(found[2])


def test_models_without_a_trained_single_head_are_refused(directory, tmp_path):
    config = transformers.LlamaConfig.from_pretrained(directory)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "lm")
    with pytest.raises(RewardError, match="score.weight not among its weights"):
        ModelReward(tmp_path / "lm", load_tokenizer(directory)).load()
    with pytest.raises(RewardError, match="3 labels"):
        ModelReward(decoder(labels=3)).load()


class AtBoundary(ModelReward):
    """As on a GPU: all samples at once, when sampling is over."""

    at_boundary = True


def test_at_the_boundary_all_are_scored_in_order_and_added():
    calls = []

    class Fails(AtBoundary):
        def scores(self, pairs):
            calls.append([s.uid for s, _ in pairs])
            return [RuntimeError("out of memory") if s.uid == "1-0" else 1.0 for s, _ in pairs]

    model = decoder()
    pairs = [(replace(s, text=str(i)), p) for i, (s, p) in enumerate(pairs_of(SEQUENCES))]
    expected = one_at_a_time(model, SEQUENCES)
    with RewardRunner([(float_of, 1.0), (Fails(Mean()), 10.0), (AtBoundary(model, name="judge"), 100.0)]) as runner:
        beside = [runner.submit(*pair).result(timeout=60) for pair in pairs]
        assert [s.score for s in beside] == list(range(len(pairs)))
        out = runner.finish(beside, [p for _, p in pairs])
    assert calls == [[f"{i}-0" for i in range(len(pairs))]]
    assert out[1].failed and out[1].score is None and out[1].info["error"] == "RuntimeError: out of memory"
    for i in (0, 2, 3, 4, 5, 6):
        assert out[i].score == pytest.approx(i + 10 + 100 * expected[i], abs=1e-3)
        assert out[i].info["rewards"] == pytest.approx({"float_of": i, "Mean": 1.0, "judge": expected[i]}, abs=1e-5)
    assert (runner.scored_total, runner.failed_total) == (6, 1)
    with RewardRunner([AtBoundary(model)]) as runner:  # nothing else: nothing to wait for beside sampling
        alone = runner.finish([runner.submit(*pairs[0]).result(timeout=60)], [pairs[0][1]])
        assert alone[0].score == pytest.approx(expected[0], abs=1e-5)


def float_of(response):
    return float(response)
