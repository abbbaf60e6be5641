import numpy as np
import pytest

from rl3d.data.dataset import PromptDataset, PromptEncoder, PromptStream, epoch_order
from rl3d.data.sources import DataError, load_rows

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}a :{% endif %}"
)


def rows(n):
    return [{"prompt": f"{'abcdefgh'[i % 8]} {i // 8} :", "answer": i} for i in range(n)]


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_exactly_one_bos(tokenizer, template):
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer)
    for prompt in ("a b :", "<s>a b :"):
        ids = encoder.encode(prompt)
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1 + (
            template is not None and prompt.startswith("<s>")  # quoted inside the user's message it stays
        )
        assert ids[-1] != tokenizer.eos_token_id
    if template:
        assert encoder.encode("a b") == tokenizer.apply_chat_template(
            [{"role": "user", "content": "a b"}], add_generation_prompt=True, return_dict=False
        )


def test_system_prompt_and_messages(tokenizer):
    plain = PromptEncoder(tokenizer, system_prompt="x y")
    assert plain.encode("a") == tokenizer("x y\n\na")["input_ids"]
    with pytest.raises(DataError, match="row 4: .* the tokenizer has no chat template"):
        plain.encode([{"role": "user", "content": "a"}], "row 4")
    tokenizer.chat_template = TEMPLATE
    chat = PromptEncoder(tokenizer, system_prompt="x y")
    assert tokenizer.decode(chat.encode("a"), skip_special_tokens=True) == "s x y u a a :"
    own = [{"role": "system", "content": "z"}, {"role": "user", "content": "a"}]
    assert tokenizer.decode(chat.encode(own), skip_special_tokens=True) == "s z u a a :"
    off = PromptEncoder(tokenizer, chat_template="none")
    assert tokenizer.decode(off.encode("a"), skip_special_tokens=True) == "a"
    with pytest.raises(DataError, match="data.chat_template is none"):
        off.encode(own)


def test_a_prompt_seen_again_is_not_tokenised_again(tokenizer):
    dataset = PromptDataset(load_rows("tiny:copy", size=64), tokenizer, max_prompt_tokens=8)
    assert dataset.encoder.misses == 4 and dataset.encoder.hits == 60
    dataset[0].token_ids.append(99)  # what a caller does to its copy stays its own
    assert dataset[0].token_ids[-1] != 99 and dataset.encoder.misses == 4
    small = PromptEncoder(tokenizer, capacity=2)
    for prompt in ("a", "b", "c", "a"):
        small.encode(prompt)
    assert small.misses == 4


def test_long_prompts_are_dropped_and_counted_or_an_error(tokenizer, caplog):
    data = [{"prompt": "a"}, {"prompt": "a b c d e f g h"}, {"prompt": "b"}]
    dataset = PromptDataset(data, tokenizer, max_prompt_tokens=4)
    assert len(dataset) == 2 and dataset.dropped == 1 and [dataset[i].text for i in range(2)] == ["a", "b"]
    assert "dropped 1 of 3 prompts" in caplog.text
    with pytest.raises(DataError, match="row 1: the prompt has 9 tokens, data.max_prompt_tokens is 4"):
        PromptDataset(data, tokenizer, max_prompt_tokens=4, drop_too_long=False)
    with pytest.raises(DataError, match="all 3 prompts are longer"):
        PromptDataset(data, tokenizer, max_prompt_tokens=1)
    with pytest.raises(DataError, match="no rows"):
        PromptDataset([], tokenizer)


def test_prompts_carry_what_the_reward_needs(tokenizer):
    dataset = PromptDataset([{"prompt": "a", "answer": 7, "data_source": "d", "level": 2}], tokenizer)
    prompt = dataset[0]
    assert (prompt.text, prompt.answer, prompt.data_source, prompt.extra) == ("a", 7, "d", {"level": 2})
    assert prompt.messages is None and prompt.index == 0


def test_each_epoch_holds_every_prompt_once_in_an_order_of_its_own(tokenizer):
    stream = PromptStream(PromptDataset(rows(32), tokenizer), 8, seed=5)
    epochs = [[p.index for _ in range(stream.batches_per_epoch) for p in stream.next_batch()] for _ in range(3)]
    assert all(sorted(order) == list(range(32)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])
    plain = PromptStream(PromptDataset(rows(32), tokenizer), 8, shuffle=False)
    assert [p.index for p in plain.next_batch()] == list(range(8))


def test_order_is_fixed_for_ever_and_close_to_uniform():
    assert epoch_order(8, seed=0, epoch=0).tolist() == [6, 4, 7, 3, 1, 2, 0, 5]
    first = [epoch_order(10, seed, epoch)[0] for seed in range(100) for epoch in range(10)]
    assert np.bincount(first, minlength=10).min() > 60


def test_position_counts_prompts_and_batches_reach_into_the_next_epoch(tokenizer):
    dataset = PromptDataset([{"prompt": "a", "n": i} for i in range(1000)], tokenizer)
    stream = PromptStream(dataset, 128)
    assert stream.batches_per_epoch == 8
    batches = [stream.next_batch() for _ in range(8)]
    assert (stream.epoch, stream.offset) == (1, 24)
    uids = [p.uid for batch in batches for p in batch]
    assert len(set(uids)) == 1024 and len({p.index for batch in batches for p in batch}) == 1000


def test_resume_goes_on_at_the_exact_prompt_also_the_second_time(tokenizer):
    dataset = PromptDataset(rows(50), tokenizer)

    def fresh(batch_size=10):
        return PromptStream(dataset, batch_size, seed=9)

    whole = fresh()
    expected = [[p.uid for p in whole.next_batch()] for _ in range(12)]
    seen, state = [], fresh().state_dict()
    for steps in (3, 1, 1, 4, 3):  # within an epoch twice, at its end, and over it
        stream = fresh()
        stream.load_state_dict(state)
        seen += [[p.uid for p in stream.next_batch()] for _ in range(steps)]
        state = stream.state_dict()
    assert seen == expected
    other_size = fresh(batch_size=5)
    other_size.load_state_dict(state)
    assert [p.uid for p in other_size.next_batch()] == [p.uid for p in whole.next_batch()][:5]


def test_an_epoch_boundary_is_not_the_end(tokenizer):
    stream = PromptStream(PromptDataset(rows(8), tokenizer), 4)
    stream.next_batch()
    stream.next_batch()
    resumed = PromptStream(stream.dataset, 4)
    resumed.load_state_dict(stream.state_dict())
    assert (resumed.epoch, resumed.offset) == (1, 0)
    assert len({p.index for _ in range(2) for p in resumed.next_batch()}) == 8


def test_other_data_or_another_order_is_refused_at_resume(tokenizer):
    state = PromptStream(PromptDataset(rows(8), tokenizer), 3).state_dict()
    changed = PromptStream(PromptDataset([*rows(7), {"prompt": "h h :"}], tokenizer), 3)
    with pytest.raises(ValueError, match="fingerprint .* start a new run"):
        changed.load_state_dict(state)
    with pytest.raises(ValueError, match="seed 0 -> 1"):
        PromptStream(PromptDataset(rows(8), tokenizer), 3, seed=1).load_state_dict(state)
    changed.load_state_dict(state | {"offset": 3}, restart_on_new_data=True)
    assert (changed.epoch, changed.offset) == (0, 0)


def test_a_batch_larger_than_the_data_is_refused(tokenizer):
    with pytest.raises(ValueError, match="batch_size=9 must be between 1 and the number of prompts, 8"):
        PromptStream(PromptDataset(rows(8), tokenizer), 9)
