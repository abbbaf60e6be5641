"""One process drives two ranks: Actor(..., num_gpus=2) and RLTrainer, with the session's own functions."""

import os
import threading
import time

import pytest
import torch

from rl3d import Actor, PPOConfig, RLTrainer, RolloutConfig, TrainerConfig
from rl3d.data.tiny import make_tiny_model
from rl3d.distributed.launcher import LocalJob
from rl3d.distributed.session import Answer, Lent, RankTraceback, Session, SessionError
from rl3d.engine.hybrid import ModeError
from tests.reference import hf_llama

PROMPTS = torch.tensor([[5, 9, 3, 7], [11, 4, 8, 6], [5, 9, 3, 7]])


@pytest.fixture(autouse=True)
def _a_plain_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def gone(pids, seconds=60):
    """Whether all these processes end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(running(pid) for pid in pids):
        time.sleep(0.05)
    return not any(running(pid) for pid in pids)


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids(actor):
    return [process.pid for process in actor.session._job._job.ranks]


def test_an_actor_of_a_session(tmp_path):
    """Greedy tokens are transformers'; functions stay here; errors come back as what they are; a dead rank is named."""
    model = hf_llama()
    tokens = model.generate(
        PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    actor = Actor(model, num_gpus=2, train="tp2.zero1", gen="tp1", device="cpu", max_sequence_length=64, verify=True,
                  algorithm=PPOConfig(batch_size=3, mini_batch_size=3, kl_coef=0.0, lr=1e-3), timeout_s=120)  # fmt: skip
    started = pids(actor)
    assert len(started) == 2 and all(running(pid) for pid in started)
    assert model.lm_head.weight.is_meta, "its weights have gone to the ranks"

    assert actor.is_training_mode and not actor.is_generation_mode
    with pytest.raises(ModeError, match="switch_to_generation") as caught:
        actor.generate(PROMPTS)
    assert isinstance(caught.value.__cause__, RankTraceback) and "on rank 0:\nTraceback" in str(caught.value.__cause__)
    report = actor.switch_to_generation()
    assert actor.is_generation_mode and report.bytes_received > 0 and report.transport == "peer"
    assert actor.generate(PROMPTS, max_new_tokens=6, temperature=0.0, stop_token_ids=[]).tolist() == tokens.tolist()
    actor.switch_to_training()
    out = actor.rollout(PROMPTS, max_new_tokens=5, stop_token_ids=[])
    assert out.sequences.shape == (3, 9) and out.sequences.device.type == "cpu"
    assert actor.update(out.sequences, torch.tensor([0.0, 1.0, 2.0]), out.logprobs)["actor/grad_norm"] > 0
    with pytest.raises(AttributeError, match="no 'weights'; it has generate, rollout, update"):
        actor.weights  # noqa: B018

    def here(text, times=2):
        return os.getpid(), threading.current_thread() is threading.main_thread(), text * times

    assert (
        actor.session.call("tests.engine.session_checks:twice", actor.session.lend(here))
        == [[(os.getpid(), False, "abab"), (os.getpid(), False, "ab")]] * 2
    )
    with pytest.raises(ZeroDivisionError):
        actor.session.call("tests.engine.session_checks:twice", actor.session.lend(lambda text, times=1: 1 / 0))

    with pytest.raises(SessionError, match="called by a function that the ranks are waiting for"):
        asks_back = actor.session.lend(lambda text, times=1: actor.is_training_mode)
        actor.session.call("tests.engine.session_checks:twice", asks_back)

    with pytest.raises(SessionError, match="rank 1 was killed by SIGKILL"):
        actor.session.call("tests.engine.session_checks:die", 1)
    with pytest.raises(SessionError, match="rank 1 was killed by SIGKILL.*make a new actor"):
        actor.switch_to_generation()
    assert gone(started)


def test_a_trainer_of_a_session(tmp_path):
    """The reward, a lambda that reads a column, and the callback run here; weights change; a second actor ends the first."""
    settings = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=64, rope_theta=1e4, tie_word_embeddings=True)  # fmt: skip
    config = PPOConfig(batch_size=2, mini_batch_size=2, kl_coef=0.0, lr=1e-3)
    options = dict(num_gpus=2, device="cpu", algorithm=config, max_sequence_length=32, timeout_s=120)
    actor = Actor(make_tiny_model(tmp_path / "model", settings), train="pp2", gen="tp1", **options)
    scored, steps = [], []

    def score(response, answer):
        scored.append((os.getpid(), answer))
        return float(len(response))

    rows = [{"prompt": f"{letter} :", "answer": letter} for letter in "abcd"]
    trainer = RLTrainer(
        actor, actor.tokenizer, rows, config, [score, (lambda prompt, response: 0.5, 2.0)],
        rollout=RolloutConfig(n=2, max_new_tokens=4),
        trainer=TrainerConfig(output_dir=str(tmp_path), name="session", steps=2, export_hf=False, resume="never"),
    )  # fmt: skip
    trainer.add_callback(lambda step, logs: steps.append((step, os.getpid(), logs["reward_mean"])))
    logs = trainer.train()
    assert [(step, pid) for step, pid, _ in steps] == [(0, os.getpid()), (1, os.getpid())]
    assert steps[-1][2] == logs["reward_mean"] >= 1.0 and trainer.global_step == 2, "0.5 at a weight of 2, and the length"
    assert len(scored) == 2 * 2 * 2 and {pid for pid, _ in scored} == {os.getpid()}
    assert {answer for _, answer in scored} == set("abcd"), "columns arrive by name"
    started = pids(actor)
    session = Session(1, device="cpu", timeout_s=120)
    assert gone(started), "the devices are free for the next"
    with pytest.raises(SessionError, match="closed"):
        actor.switch_to_generation()
    session.close()


def test_errors_that_cannot_travel_keep_their_words():
    class Odd(Exception):
        def __init__(self, left, right):
            super().__init__(f"{left} and {right}")

    answer = Answer.of(Odd("this", "that"), "its traceback")
    assert isinstance(answer.error, SessionError) and str(answer.error) == "Odd: this and that"
    assert isinstance(Answer.of(ModeError("wrong"), "").error, ModeError)


def test_a_stand_in_shows_the_parameters_of_the_original():
    import inspect
    import pickle

    lent = Lent(3, "score", (("prompt", 1, False), ("bonus", 3, True)))
    copy = pickle.loads(pickle.dumps(lent))
    assert copy.__name__ == "score"
    assert [(p.name, p.kind.name, p.default) for p in inspect.signature(copy).parameters.values()] == [
        ("prompt", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty), ("bonus", "KEYWORD_ONLY", None)]  # fmt: skip


def test_ranks_that_do_not_come_up_and_wrong_numbers_are_said():
    with pytest.raises(ValueError, match="num_gpus = 0: expected the number of ranks"):
        Actor("nowhere", num_gpus=0)
    with pytest.raises(SessionError, match="(?s)ranks of this session are gone.*device='tpu'"):
        Session(1, device="tpu", timeout_s=60)


def test_a_job_beside_the_process_is_stopped():
    job = LocalJob(["-c", "import time; time.sleep(600)"], 2)
    while len(job._job.ranks) < 2:
        time.sleep(0.01)
    started = [process.pid for process in job._job.ranks]
    assert job.poll() is None
    job.stop()
    job.stop()
    assert job.poll() is not None and job.poll().code == 143 and gone(started)
