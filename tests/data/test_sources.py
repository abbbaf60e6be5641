import json
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rl3d.data.sources import DataError, Row, load_rows, rows_from
from rl3d.rewards.functions import reasoning_gym_score


@dataclass
class ConfiguredSource:
    source: str
    weight: float = 1.0
    options: dict = field(default_factory=dict)


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_jsonl_rows_keep_their_columns(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1?", "answer": 2, "data_source": "sums", "level": 3},
        "",
        {"prompt": messages, "hint": None},
    )
    first, second = load_rows(path)
    assert (first.prompt, first.answer, first.data_source, first.extra) == ("1+1?", 2, "sums", {"level": 3})
    assert (second.prompt, second.answer, second.data_source) == (messages, None, path)
    assert second.where == f"{path}:3"
    assert len(load_rows(path, size=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ([1], "expected an object"),
        ({"question": "x"}, r"no 'prompt' among its columns \['question'\]; name it with data.prompt_key"),
        ({"prompt": "  "}, "the prompt is empty"),
        ({"prompt": []}, "expected text or a list of messages"),
        ({"prompt": 3}, "expected text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "must be like"),
        ({"prompt": [{"role": "user", "content": ""}]}, "no message has content"),
        ({"prompt": "x", "response": "y"}, "column 'response'"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(DataError, match=message) as error:
        load_rows(path)
    assert str(error.value).startswith(f"{path}:2: ")


def test_missing_and_empty_files_and_other_keys(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no rows in it"):
        load_rows(write(tmp_path / "empty.jsonl"))
    with pytest.raises(DataError, match="takes no options"):
        load_rows({"source": write(tmp_path / "x.jsonl", {"prompt": "x"}), "options": {"a": 1}})
    path = write(tmp_path / "q.jsonl", {"question": "x", "prompt": "other"})
    with pytest.raises(DataError, match="column 'prompt'"):
        load_rows(path, prompt_key="question")
    assert load_rows(write(tmp_path / "k.jsonl", {"q": "x"}), prompt_key="q")[0].prompt == "x"


def test_mixture_follows_the_weights_everywhere(tmp_path):
    a = write(tmp_path / "a.jsonl", *({"prompt": f"a{i}", "data_source": "a"} for i in range(100)))
    b = write(tmp_path / "b.jsonl", *({"prompt": f"b{i}", "data_source": "b"} for i in range(10)))
    rows = load_rows([ConfiguredSource(a, 3), ConfiguredSource(b, 1)], size=40)
    assert Counter(row.data_source for row in rows) == {"a": 30, "b": 10}
    for start in range(0, 40, 8):
        assert abs(Counter(row.data_source for row in rows[start : start + 8])["b"] - 2) <= 1
    assert [row.prompt for row in rows if row.data_source == "b"] == [f"b{i}" for i in range(10)]


def test_without_a_size_no_row_is_left_out_and_short_sources_repeat(tmp_path):
    a = write(tmp_path / "a.jsonl", *({"prompt": f"a{i}"} for i in range(7)))
    b = write(tmp_path / "b.jsonl", {"prompt": "b0"}, {"prompt": "b1"})
    rows = load_rows([a, b])
    prompts = Counter(row.prompt for row in rows)
    assert len(rows) == 14 and all(prompts[f"a{i}"] == 1 for i in range(7)) and prompts["b0"] + prompts["b1"] == 7


def test_reasoning_gym_rows_keep_the_entry_their_verifier_needs():
    source = {"source": "reasoning_gym:chain_sum", "options": {"min_terms": 2, "max_terms": 2}}
    rows = load_rows([source, "reasoning_gym:letter_counting"], size=6, seed=3)
    assert rows == load_rows([source, "reasoning_gym:letter_counting"], size=6, seed=3)
    assert rows != load_rows([source, "reasoning_gym:letter_counting"], size=6, seed=4)
    assert {row.data_source for row in rows} == {"chain_sum", "letter_counting"}
    for row in rows:
        assert reasoning_gym_score(row.answer, row.data_source, row.extra["entry"]) == 1.0
        assert reasoning_gym_score("no idea", row.data_source, row.extra["entry"]) < 0.5
    with pytest.raises(DataError, match="reasoning_gym:chain_summ: no such task; near it: .*chain_sum"):
        load_rows("reasoning_gym:chain_summ")
    with pytest.raises(DataError, match="options .*'terms': 2.* are not accepted"):
        load_rows({"source": "reasoning_gym:chain_sum", "options": {"terms": 2}})


def test_tiny_rows_are_reproducible_and_unknown_tasks_named():
    rows = load_rows("tiny:copy", size=50, seed=1)
    assert rows == load_rows("tiny:copy", size=50, seed=1) != load_rows("tiny:copy", size=50, seed=2)
    assert {row.answer for row in rows} == set("abcd") and all(row.prompt == f"{row.answer} :" for row in rows)
    with pytest.raises(DataError, match="tiny:dance: no such task"):
        load_rows("tiny:dance")


def test_python_objects_are_rows_too():
    rows = rows_from(["hello", {"prompt": "x", "answer": 1, "k": 2}, Row("y")])
    assert [row.prompt for row in rows] == ["hello", "x", "y"] and rows[1].extra == {"k": 2}
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        rows_from(["x", ""])
